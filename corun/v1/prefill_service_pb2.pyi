from corun.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BlockIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class KvOwner(_message.Message):
    __slots__ = ("request_id", "num_blocks")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    num_blocks: int
    def __init__(self, request_id: _Optional[str] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class KvHandle(_message.Message):
    __slots__ = ("prefill_node", "engine_id", "request_id", "block_ids", "host", "port", "tp_size", "num_tokens", "prompt_digest", "reader", "binding", "claim", "owners", "cached_tokens")
    PREFILL_NODE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    BINDING_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prefill_node: _types_pb2.NodeRef
    engine_id: str
    request_id: str
    block_ids: _containers.RepeatedCompositeFieldContainer[BlockIds]
    host: str
    port: int
    tp_size: int
    num_tokens: int
    prompt_digest: str
    reader: _types_pb2.NodeRef
    binding: str
    claim: str
    owners: _containers.RepeatedCompositeFieldContainer[KvOwner]
    cached_tokens: int
    def __init__(self, prefill_node: _Optional[_Union[_types_pb2.NodeRef, _Mapping]] = ..., engine_id: _Optional[str] = ..., request_id: _Optional[str] = ..., block_ids: _Optional[_Iterable[_Union[BlockIds, _Mapping]]] = ..., host: _Optional[str] = ..., port: _Optional[int] = ..., tp_size: _Optional[int] = ..., num_tokens: _Optional[int] = ..., prompt_digest: _Optional[str] = ..., reader: _Optional[_Union[_types_pb2.NodeRef, _Mapping]] = ..., binding: _Optional[str] = ..., claim: _Optional[str] = ..., owners: _Optional[_Iterable[_Union[KvOwner, _Mapping]]] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("request_id", "generation", "prompt_token_ids", "reader", "share_scope", "more_follow", "isolated", "sample")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    SHARE_SCOPE_FIELD_NUMBER: _ClassVar[int]
    MORE_FOLLOW_FIELD_NUMBER: _ClassVar[int]
    ISOLATED_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    generation: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    reader: _types_pb2.NodeRef
    share_scope: str
    more_follow: bool
    isolated: bool
    sample: PromptSample
    def __init__(self, request_id: _Optional[str] = ..., generation: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., reader: _Optional[_Union[_types_pb2.NodeRef, _Mapping]] = ..., share_scope: _Optional[str] = ..., more_follow: bool = ..., isolated: bool = ..., sample: _Optional[_Union[PromptSample, _Mapping]] = ...) -> None: ...

class PromptSample(_message.Message):
    __slots__ = ("sampling_params", "seed", "router_id", "session", "share_key")
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SHARE_KEY_FIELD_NUMBER: _ClassVar[int]
    sampling_params: _types_pb2.SamplingParams
    seed: int
    router_id: str
    session: int
    share_key: str
    def __init__(self, sampling_params: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., seed: _Optional[int] = ..., router_id: _Optional[str] = ..., session: _Optional[int] = ..., share_key: _Optional[str] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("handle", "started", "lease_id")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    handle: KvHandle
    started: bool
    lease_id: int
    def __init__(self, handle: _Optional[_Union[KvHandle, _Mapping]] = ..., started: bool = ..., lease_id: _Optional[int] = ...) -> None: ...

class ReleaseKvRequest(_message.Message):
    __slots__ = ("request_id", "generation")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    generation: str
    def __init__(self, request_id: _Optional[str] = ..., generation: _Optional[str] = ...) -> None: ...

class ReleaseKvResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ScoreTokensRequest(_message.Message):
    __slots__ = ("request_id", "generation", "token_ids", "num_scored", "share_scope")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_SCORED_FIELD_NUMBER: _ClassVar[int]
    SHARE_SCOPE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    generation: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_scored: int
    share_scope: str
    def __init__(self, request_id: _Optional[str] = ..., generation: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_scored: _Optional[int] = ..., share_scope: _Optional[str] = ...) -> None: ...

class ScoreTokensResponse(_message.Message):
    __slots__ = ("logprobs", "top_token_ids", "top_logprobs", "cached_tokens")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    cached_tokens: int
    def __init__(self, logprobs: _Optional[_Iterable[float]] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ..., cached_tokens: _Optional[int] = ...) -> None: ...
