from corun.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NodeRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NODE_ROLE_UNSPECIFIED: _ClassVar[NodeRole]
    NODE_ROLE_PREFILL: _ClassVar[NodeRole]
    NODE_ROLE_DECODE: _ClassVar[NodeRole]
NODE_ROLE_UNSPECIFIED: NodeRole
NODE_ROLE_PREFILL: NodeRole
NODE_ROLE_DECODE: NodeRole

class NixlEndpoint(_message.Message):
    __slots__ = ("engine_id", "host", "port", "tp_size", "stamp_addresses")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    STAMP_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    host: str
    port: int
    tp_size: int
    stamp_addresses: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, engine_id: _Optional[str] = ..., host: _Optional[str] = ..., port: _Optional[int] = ..., tp_size: _Optional[int] = ..., stamp_addresses: _Optional[_Iterable[int]] = ...) -> None: ...

class FreedomStatus(_message.Message):
    __slots__ = ("name", "refused")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    name: str
    refused: str
    def __init__(self, name: _Optional[str] = ..., refused: _Optional[str] = ...) -> None: ...

class NodeInfo(_message.Message):
    __slots__ = ("ref", "role", "address", "contract_json", "slots", "kv_blocks", "block_size", "max_model_len", "vocab_size", "nixl", "model", "finding", "freedoms", "certificate", "engine_id", "step_tokens")
    REF_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_JSON_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    NIXL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINDING_FIELD_NUMBER: _ClassVar[int]
    FREEDOMS_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ref: _types_pb2.NodeRef
    role: NodeRole
    address: str
    contract_json: str
    slots: int
    kv_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    nixl: NixlEndpoint
    model: str
    finding: str
    freedoms: _containers.RepeatedCompositeFieldContainer[FreedomStatus]
    certificate: str
    engine_id: str
    step_tokens: int
    def __init__(self, ref: _Optional[_Union[_types_pb2.NodeRef, _Mapping]] = ..., role: _Optional[_Union[NodeRole, str]] = ..., address: _Optional[str] = ..., contract_json: _Optional[str] = ..., slots: _Optional[int] = ..., kv_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., nixl: _Optional[_Union[NixlEndpoint, _Mapping]] = ..., model: _Optional[str] = ..., finding: _Optional[str] = ..., freedoms: _Optional[_Iterable[_Union[FreedomStatus, _Mapping]]] = ..., certificate: _Optional[str] = ..., engine_id: _Optional[str] = ..., step_tokens: _Optional[int] = ...) -> None: ...

class NodeLoad(_message.Message):
    __slots__ = ("used_slots", "used_kv_blocks", "queued_prompt_tokens", "steps", "tokens", "kv_reads", "leases", "cached_tokens", "rows", "used_rows", "step_seconds", "timed_steps")
    USED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    USED_KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_READS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    USED_ROWS_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TIMED_STEPS_FIELD_NUMBER: _ClassVar[int]
    used_slots: int
    used_kv_blocks: int
    queued_prompt_tokens: int
    steps: int
    tokens: int
    kv_reads: KvReads
    leases: int
    cached_tokens: int
    rows: int
    used_rows: int
    step_seconds: float
    timed_steps: int
    def __init__(self, used_slots: _Optional[int] = ..., used_kv_blocks: _Optional[int] = ..., queued_prompt_tokens: _Optional[int] = ..., steps: _Optional[int] = ..., tokens: _Optional[int] = ..., kv_reads: _Optional[_Union[KvReads, _Mapping]] = ..., leases: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., rows: _Optional[int] = ..., used_rows: _Optional[int] = ..., step_seconds: _Optional[float] = ..., timed_steps: _Optional[int] = ...) -> None: ...

class KvReads(_message.Message):
    __slots__ = ("count", "bytes", "seconds", "failed", "shared_tokens", "prompt_tokens")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    SHARED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    count: int
    bytes: int
    seconds: float
    failed: int
    shared_tokens: int
    prompt_tokens: int
    def __init__(self, count: _Optional[int] = ..., bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., failed: _Optional[int] = ..., shared_tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: NodeInfo
    def __init__(self, node: _Optional[_Union[NodeInfo, _Mapping]] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("router_id", "heartbeat_interval_ms", "quarantined")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    heartbeat_interval_ms: int
    quarantined: str
    def __init__(self, router_id: _Optional[str] = ..., heartbeat_interval_ms: _Optional[int] = ..., quarantined: _Optional[str] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("ref", "load", "draining", "stuck")
    REF_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    STUCK_FIELD_NUMBER: _ClassVar[int]
    ref: _types_pb2.NodeRef
    load: NodeLoad
    draining: bool
    stuck: str
    def __init__(self, ref: _Optional[_Union[_types_pb2.NodeRef, _Mapping]] = ..., load: _Optional[_Union[NodeLoad, _Mapping]] = ..., draining: bool = ..., stuck: _Optional[str] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("quarantined",)
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    quarantined: str
    def __init__(self, quarantined: _Optional[str] = ...) -> None: ...
