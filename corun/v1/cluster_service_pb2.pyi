from corun.v1 import registry_service_pb2 as _registry_service_pb2
from corun.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Priority(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PRIORITY_UNSPECIFIED: _ClassVar[Priority]
    PRIORITY_HIGH: _ClassVar[Priority]
    PRIORITY_NORMAL: _ClassVar[Priority]
    PRIORITY_LOW: _ClassVar[Priority]

class NodeState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NODE_STATE_UNSPECIFIED: _ClassVar[NodeState]
    NODE_STATE_READY: _ClassVar[NodeState]
    NODE_STATE_JOINING: _ClassVar[NodeState]
    NODE_STATE_LOST: _ClassVar[NodeState]
    NODE_STATE_REFUSED: _ClassVar[NodeState]
    NODE_STATE_DRAINING: _ClassVar[NodeState]

class Condition(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CONDITION_UNSPECIFIED: _ClassVar[Condition]
    CONDITION_ALONE: _ClassVar[Condition]
    CONDITION_CROWDED: _ClassVar[Condition]
    CONDITION_OTHER_SLOTS: _ClassVar[Condition]
    CONDITION_SHUFFLED: _ClassVar[Condition]
PRIORITY_UNSPECIFIED: Priority
PRIORITY_HIGH: Priority
PRIORITY_NORMAL: Priority
PRIORITY_LOW: Priority
NODE_STATE_UNSPECIFIED: NodeState
NODE_STATE_READY: NodeState
NODE_STATE_JOINING: NodeState
NODE_STATE_LOST: NodeState
NODE_STATE_REFUSED: NodeState
NODE_STATE_DRAINING: NodeState
CONDITION_UNSPECIFIED: Condition
CONDITION_ALONE: Condition
CONDITION_CROWDED: Condition
CONDITION_OTHER_SLOTS: Condition
CONDITION_SHUFFLED: Condition

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "text", "token_ids", "sampling_params", "seed", "resume", "fingerprint", "priority", "token_texts", "stream_id", "call_number")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TOKEN_TEXTS_FIELD_NUMBER: _ClassVar[int]
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    CALL_NUMBER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    token_ids: TokenIds
    sampling_params: _types_pb2.SamplingParams
    seed: int
    resume: _containers.RepeatedCompositeFieldContainer[ResumePoint]
    fingerprint: str
    priority: Priority
    token_texts: bool
    stream_id: str
    call_number: int
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., sampling_params: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., seed: _Optional[int] = ..., resume: _Optional[_Iterable[_Union[ResumePoint, _Mapping]]] = ..., fingerprint: _Optional[str] = ..., priority: _Optional[_Union[Priority, str]] = ..., token_texts: bool = ..., stream_id: _Optional[str] = ..., call_number: _Optional[int] = ...) -> None: ...

class ResumePoint(_message.Message):
    __slots__ = ("sample_index", "seed", "num_tokens", "output_digest", "text_bytes", "done")
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TEXT_BYTES_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    sample_index: int
    seed: int
    num_tokens: int
    output_digest: str
    text_bytes: int
    done: bool
    def __init__(self, sample_index: _Optional[int] = ..., seed: _Optional[int] = ..., num_tokens: _Optional[int] = ..., output_digest: _Optional[str] = ..., text_bytes: _Optional[int] = ..., done: bool = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "sample_index", "seed", "text", "token_ids", "logprobs", "finish_reason", "receipt", "prompt_token_ids", "fingerprint", "token_texts", "call_number", "top_logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_TEXTS_FIELD_NUMBER: _ClassVar[int]
    CALL_NUMBER_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    sample_index: int
    seed: int
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    finish_reason: _types_pb2.FinishReason
    receipt: _types_pb2.Receipt
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    fingerprint: str
    token_texts: _containers.RepeatedScalarFieldContainer[str]
    call_number: int
    top_logprobs: _containers.RepeatedCompositeFieldContainer[TopLogprobs]
    def __init__(self, request_id: _Optional[str] = ..., sample_index: _Optional[int] = ..., seed: _Optional[int] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., finish_reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., receipt: _Optional[_Union[_types_pb2.Receipt, _Mapping]] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., fingerprint: _Optional[str] = ..., token_texts: _Optional[_Iterable[str]] = ..., call_number: _Optional[int] = ..., top_logprobs: _Optional[_Iterable[_Union[TopLogprobs, _Mapping]]] = ...) -> None: ...

class TopLogprobs(_message.Message):
    __slots__ = ("token_ids", "logprobs", "texts")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., texts: _Optional[_Iterable[str]] = ...) -> None: ...

class StreamOutputsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StreamOutputsResponse(_message.Message):
    __slots__ = ("stream_id", "responses", "ended")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    RESPONSES_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    stream_id: str
    responses: _containers.RepeatedCompositeFieldContainer[GenerateResponse]
    ended: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, stream_id: _Optional[str] = ..., responses: _Optional[_Iterable[_Union[GenerateResponse, _Mapping]]] = ..., ended: _Optional[_Iterable[int]] = ...) -> None: ...

class TextOrTokens(_message.Message):
    __slots__ = ("text", "token_ids")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: TokenIds
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("request_id", "prompt", "continuations", "priority", "token_texts")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    CONTINUATIONS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TOKEN_TEXTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt: TextOrTokens
    continuations: _containers.RepeatedCompositeFieldContainer[TextOrTokens]
    priority: Priority
    token_texts: bool
    def __init__(self, request_id: _Optional[str] = ..., prompt: _Optional[_Union[TextOrTokens, _Mapping]] = ..., continuations: _Optional[_Iterable[_Union[TextOrTokens, _Mapping]]] = ..., priority: _Optional[_Union[Priority, str]] = ..., token_texts: bool = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("request_id", "fingerprint", "prompt_token_ids", "scores", "prompt_token_texts")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_TEXTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    fingerprint: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    scores: _containers.RepeatedCompositeFieldContainer[Score]
    prompt_token_texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_id: _Optional[str] = ..., fingerprint: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., scores: _Optional[_Iterable[_Union[Score, _Mapping]]] = ..., prompt_token_texts: _Optional[_Iterable[str]] = ...) -> None: ...

class Score(_message.Message):
    __slots__ = ("token_ids", "logprobs", "top_token_ids", "top_logprobs", "output_digest", "equals_generation", "prefill_node", "cached_tokens", "token_texts", "top_token_texts")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    EQUALS_GENERATION_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NODE_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_TEXTS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_TEXTS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    output_digest: str
    equals_generation: bool
    prefill_node: _types_pb2.NodeRef
    cached_tokens: int
    token_texts: _containers.RepeatedScalarFieldContainer[str]
    top_token_texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ..., output_digest: _Optional[str] = ..., equals_generation: bool = ..., prefill_node: _Optional[_Union[_types_pb2.NodeRef, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., token_texts: _Optional[_Iterable[str]] = ..., top_token_texts: _Optional[_Iterable[str]] = ...) -> None: ...

class GetClusterRequest(_message.Message):
    __slots__ = ("with_samples", "without_contracts", "with_clients")
    WITH_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_CONTRACTS_FIELD_NUMBER: _ClassVar[int]
    WITH_CLIENTS_FIELD_NUMBER: _ClassVar[int]
    with_samples: bool
    without_contracts: bool
    with_clients: bool
    def __init__(self, with_samples: bool = ..., without_contracts: bool = ..., with_clients: bool = ...) -> None: ...

class GetClusterResponse(_message.Message):
    __slots__ = ("router_id", "fingerprint", "nodes", "queued_samples", "max_queued_samples", "finished_samples", "mismatches", "refused_requests", "audit", "model", "queued_prompt_tokens", "sample_retries", "first_token_seconds", "output_token_seconds", "clients")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    QUEUED_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    FINISHED_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    MISMATCHES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_RETRIES_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    fingerprint: str
    nodes: _containers.RepeatedCompositeFieldContainer[NodeStatus]
    queued_samples: int
    max_queued_samples: int
    finished_samples: int
    mismatches: int
    refused_requests: int
    audit: AuditStatus
    model: ModelStatus
    queued_prompt_tokens: int
    sample_retries: int
    first_token_seconds: Distribution
    output_token_seconds: Distribution
    clients: _containers.RepeatedCompositeFieldContainer[ClientStatus]
    def __init__(self, router_id: _Optional[str] = ..., fingerprint: _Optional[str] = ..., nodes: _Optional[_Iterable[_Union[NodeStatus, _Mapping]]] = ..., queued_samples: _Optional[int] = ..., max_queued_samples: _Optional[int] = ..., finished_samples: _Optional[int] = ..., mismatches: _Optional[int] = ..., refused_requests: _Optional[int] = ..., audit: _Optional[_Union[AuditStatus, _Mapping]] = ..., model: _Optional[_Union[ModelStatus, _Mapping]] = ..., queued_prompt_tokens: _Optional[int] = ..., sample_retries: _Optional[int] = ..., first_token_seconds: _Optional[_Union[Distribution, _Mapping]] = ..., output_token_seconds: _Optional[_Union[Distribution, _Mapping]] = ..., clients: _Optional[_Iterable[_Union[ClientStatus, _Mapping]]] = ...) -> None: ...

class ClientStatus(_message.Message):
    __slots__ = ("name", "weight", "waiting_samples", "leased_samples", "decoding_samples")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    WAITING_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LEASED_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    DECODING_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    name: str
    weight: int
    waiting_samples: int
    leased_samples: int
    decoding_samples: int
    def __init__(self, name: _Optional[str] = ..., weight: _Optional[int] = ..., waiting_samples: _Optional[int] = ..., leased_samples: _Optional[int] = ..., decoding_samples: _Optional[int] = ...) -> None: ...

class Distribution(_message.Message):
    __slots__ = ("bounds", "counts", "sum")
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    bounds: _containers.RepeatedScalarFieldContainer[float]
    counts: _containers.RepeatedScalarFieldContainer[int]
    sum: float
    def __init__(self, bounds: _Optional[_Iterable[float]] = ..., counts: _Optional[_Iterable[int]] = ..., sum: _Optional[float] = ...) -> None: ...

class ModelStatus(_message.Message):
    __slots__ = ("name", "max_model_len", "max_prompt_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    max_model_len: int
    max_prompt_bytes: int
    def __init__(self, name: _Optional[str] = ..., max_model_len: _Optional[int] = ..., max_prompt_bytes: _Optional[int] = ...) -> None: ...

class GetChatTemplateRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetChatTemplateResponse(_message.Message):
    __slots__ = ("source", "source_for_tools", "special_tokens")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FOR_TOOLS_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    source: str
    source_for_tools: str
    special_tokens: _containers.RepeatedCompositeFieldContainer[SpecialToken]
    def __init__(self, source: _Optional[str] = ..., source_for_tools: _Optional[str] = ..., special_tokens: _Optional[_Iterable[_Union[SpecialToken, _Mapping]]] = ...) -> None: ...

class SpecialToken(_message.Message):
    __slots__ = ("name", "text")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    name: str
    text: str
    def __init__(self, name: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("text", "without_special_tokens", "with_spellings")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WITH_SPELLINGS_FIELD_NUMBER: _ClassVar[int]
    text: str
    without_special_tokens: bool
    with_spellings: bool
    def __init__(self, text: _Optional[str] = ..., without_special_tokens: bool = ..., with_spellings: bool = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids", "tokens")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[str]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: TokenIds
    def __init__(self, token_ids: _Optional[_Union[TokenIds, _Mapping]] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class AuditStatus(_message.Message):
    __slots__ = ("matched", "mismatched", "failed", "skipped", "same_node", "waiting", "last_mismatch")
    MATCHED_FIELD_NUMBER: _ClassVar[int]
    MISMATCHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    SAME_NODE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    LAST_MISMATCH_FIELD_NUMBER: _ClassVar[int]
    matched: int
    mismatched: int
    failed: int
    skipped: int
    same_node: int
    waiting: int
    last_mismatch: str
    def __init__(self, matched: _Optional[int] = ..., mismatched: _Optional[int] = ..., failed: _Optional[int] = ..., skipped: _Optional[int] = ..., same_node: _Optional[int] = ..., waiting: _Optional[int] = ..., last_mismatch: _Optional[str] = ...) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("node", "load", "state", "detail", "last_heartbeat_ms", "samples")
    NODE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    LAST_HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    node: _registry_service_pb2.NodeInfo
    load: _registry_service_pb2.NodeLoad
    state: NodeState
    detail: str
    last_heartbeat_ms: int
    samples: SlotSamples
    def __init__(self, node: _Optional[_Union[_registry_service_pb2.NodeInfo, _Mapping]] = ..., load: _Optional[_Union[_registry_service_pb2.NodeLoad, _Mapping]] = ..., state: _Optional[_Union[NodeState, str]] = ..., detail: _Optional[str] = ..., last_heartbeat_ms: _Optional[int] = ..., samples: _Optional[_Union[SlotSamples, _Mapping]] = ...) -> None: ...

class SlotSamples(_message.Message):
    __slots__ = ("places", "decoding", "ages_ms", "others", "told", "request_ids", "sample_indices", "seeds", "num_tokens", "max_tokens")
    PLACES_FIELD_NUMBER: _ClassVar[int]
    DECODING_FIELD_NUMBER: _ClassVar[int]
    AGES_MS_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    TOLD_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDICES_FIELD_NUMBER: _ClassVar[int]
    SEEDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    places: _containers.RepeatedScalarFieldContainer[int]
    decoding: _containers.RepeatedScalarFieldContainer[bool]
    ages_ms: _containers.RepeatedScalarFieldContainer[int]
    others: int
    told: _containers.RepeatedScalarFieldContainer[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    sample_indices: _containers.RepeatedScalarFieldContainer[int]
    seeds: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, places: _Optional[_Iterable[int]] = ..., decoding: _Optional[_Iterable[bool]] = ..., ages_ms: _Optional[_Iterable[int]] = ..., others: _Optional[int] = ..., told: _Optional[_Iterable[int]] = ..., request_ids: _Optional[_Iterable[str]] = ..., sample_indices: _Optional[_Iterable[int]] = ..., seeds: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class VerifyCase(_message.Message):
    __slots__ = ("prompt_token_ids", "sampling_params", "seed", "output_digest", "text")
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling_params: _types_pb2.SamplingParams
    seed: int
    output_digest: str
    text: str
    def __init__(self, prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling_params: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., seed: _Optional[int] = ..., output_digest: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("cases", "conditions", "order_seed")
    CASES_FIELD_NUMBER: _ClassVar[int]
    CONDITIONS_FIELD_NUMBER: _ClassVar[int]
    ORDER_SEED_FIELD_NUMBER: _ClassVar[int]
    cases: _containers.RepeatedCompositeFieldContainer[VerifyCase]
    conditions: _containers.RepeatedScalarFieldContainer[Condition]
    order_seed: int
    def __init__(self, cases: _Optional[_Iterable[_Union[VerifyCase, _Mapping]]] = ..., conditions: _Optional[_Iterable[_Union[Condition, str]]] = ..., order_seed: _Optional[int] = ...) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("case_index", "condition", "match", "expected_digest", "receipt", "error", "text_digest", "alternatives_digest")
    CASE_INDEX_FIELD_NUMBER: _ClassVar[int]
    CONDITION_FIELD_NUMBER: _ClassVar[int]
    MATCH_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_DIGEST_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TEXT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVES_DIGEST_FIELD_NUMBER: _ClassVar[int]
    case_index: int
    condition: Condition
    match: bool
    expected_digest: str
    receipt: _types_pb2.Receipt
    error: str
    text_digest: str
    alternatives_digest: str
    def __init__(self, case_index: _Optional[int] = ..., condition: _Optional[_Union[Condition, str]] = ..., match: bool = ..., expected_digest: _Optional[str] = ..., receipt: _Optional[_Union[_types_pb2.Receipt, _Mapping]] = ..., error: _Optional[str] = ..., text_digest: _Optional[str] = ..., alternatives_digest: _Optional[str] = ...) -> None: ...
