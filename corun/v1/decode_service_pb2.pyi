from corun.v1 import prefill_service_pb2 as _prefill_service_pb2
from corun.v1 import registry_service_pb2 as _registry_service_pb2
from corun.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReserveRequest(_message.Message):
    __slots__ = ("router_id", "generation", "num_prompt_tokens", "max_tokens", "session", "share_key")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SHARE_KEY_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    generation: str
    num_prompt_tokens: int
    max_tokens: int
    session: int
    share_key: str
    def __init__(self, router_id: _Optional[str] = ..., generation: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., session: _Optional[int] = ..., share_key: _Optional[str] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("lease_id", "ttl_ms")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    ttl_ms: int
    def __init__(self, lease_id: _Optional[int] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class StartRequest(_message.Message):
    __slots__ = ("lease_id", "generation", "handle", "prompt_token_ids", "sampling_params", "seed")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    generation: str
    handle: _prefill_service_pb2.KvHandle
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling_params: _types_pb2.SamplingParams
    seed: int
    def __init__(self, lease_id: _Optional[int] = ..., generation: _Optional[str] = ..., handle: _Optional[_Union[_prefill_service_pb2.KvHandle, _Mapping]] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling_params: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., seed: _Optional[int] = ...) -> None: ...

class StartResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease_id", "generation")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    generation: str
    def __init__(self, lease_id: _Optional[int] = ..., generation: _Optional[str] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ConnectRequest(_message.Message):
    __slots__ = ("generation", "peer")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    generation: str
    peer: _registry_service_pb2.NixlEndpoint
    def __init__(self, generation: _Optional[str] = ..., peer: _Optional[_Union[_registry_service_pb2.NixlEndpoint, _Mapping]] = ...) -> None: ...

class ConnectResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StreamStepsRequest(_message.Message):
    __slots__ = ("router_id", "generation", "session")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    generation: str
    session: int
    def __init__(self, router_id: _Optional[str] = ..., generation: _Optional[str] = ..., session: _Optional[int] = ...) -> None: ...

class StreamStepsResponse(_message.Message):
    __slots__ = ("step", "lease_ids", "token_ids", "logprobs", "ended", "read", "alternatives", "granted")
    STEP_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    READ_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    step: int
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    ended: _containers.RepeatedCompositeFieldContainer[LeaseEnd]
    read: _containers.RepeatedScalarFieldContainer[int]
    alternatives: _containers.RepeatedCompositeFieldContainer[RowAlternatives]
    granted: _containers.RepeatedCompositeFieldContainer[LeaseGrant]
    def __init__(self, step: _Optional[int] = ..., lease_ids: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., ended: _Optional[_Iterable[_Union[LeaseEnd, _Mapping]]] = ..., read: _Optional[_Iterable[int]] = ..., alternatives: _Optional[_Iterable[_Union[RowAlternatives, _Mapping]]] = ..., granted: _Optional[_Iterable[_Union[LeaseGrant, _Mapping]]] = ...) -> None: ...

class LeaseGrant(_message.Message):
    __slots__ = ("request_id", "lease_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    lease_id: int
    def __init__(self, request_id: _Optional[str] = ..., lease_id: _Optional[int] = ...) -> None: ...

class RowAlternatives(_message.Message):
    __slots__ = ("row", "token_ids", "logprobs")
    ROW_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    row: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, row: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class LeaseEnd(_message.Message):
    __slots__ = ("lease_id", "finish_reason", "detail", "not_finite", "invalid")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    NOT_FINITE_FIELD_NUMBER: _ClassVar[int]
    INVALID_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    finish_reason: _types_pb2.FinishReason
    detail: str
    not_finite: bool
    invalid: bool
    def __init__(self, lease_id: _Optional[int] = ..., finish_reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., detail: _Optional[str] = ..., not_finite: bool = ..., invalid: bool = ...) -> None: ...
