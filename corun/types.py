"""The plain values that cross process boundaries: a node's identity, what it holds, and its state.

They mirror the messages in protos/corun/v1 field by field. This module must not know how the values travel
(`corun.rpc.codec`) nor what they are used for.
"""

from __future__ import annotations

import enum
import functools
import secrets
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from types import GenericAlias, NoneType
from typing import Any, NamedTuple, get_args, get_type_hints

from corun.errors import InvalidArgumentError


class FinishReason(enum.Enum):
    """Why a sample ended."""

    STOP = "stop"
    """A stop string, a stop token or the end-of-sequence token ended the sample."""
    LENGTH = "length"
    """The sample reached max_tokens."""
    ERROR = "error"
    """The run failed, and the sample must run again from its prompt. Only nodes and routers use this reason."""


class Alternatives(NamedTuple):
    """The likeliest tokens at one place of an output, the likeliest first, the lower id first of equal ones."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    """The fp32 log probability of each, under the raw logits. It has the bits that the token would get if it were
    drawn."""
    texts: tuple[str, ...] = ()
    """The text of each token alone. Empty unless texts were asked for."""


NO_ALTERNATIVES = Alternatives()


class Priority(enum.Enum):
    """Which waiting requests are placed on nodes first, in this order. Running samples are not touched."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"
    """The request is placed when no request of a higher priority waits. It may wait for as long as its deadline."""


class NodeRole(enum.Enum):
    """What a node computes."""

    PREFILL = "prefill"
    DECODE = "decode"


class NodeState(enum.Enum):
    """Whether a router uses a node."""

    READY = "ready"
    JOINING = "joining"
    """The node has registered; its NIXL pairs are still being warmed."""
    LOST = "lost"
    """The node's heartbeats stopped, or its step stream broke. A node that ended as planned is LOST, too, with the
    detail `GONE_AS_PLANNED`."""
    REFUSED = "refused"
    """The node's contract differs from the cluster's, it failed its self-test, or it may have given other bits."""
    DRAINING = "draining"
    """The node takes no new work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRef:
    """One life of one node process. A restarted node has the same id and a new generation."""

    node_id: str
    generation: str
    """The random name of this life of the process; 16 hex digits."""

    def __str__(self) -> str:
        return f"{self.node_id}@{self.generation}"


@dataclass(frozen=True, kw_only=True, slots=True)
class NixlEndpoint:
    """Where a prefill node's KV is read from."""

    engine_id: str
    """The engine's id, which is unique to one generation."""
    host: str
    port: int
    tp_size: int
    stamp_addresses: tuple[int, ...] = ()
    """The memory address of each rank's table of block stamps; known once the engine has started."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KvOwner:
    """Consecutive blocks of a prompt that one prefill computed."""

    request_id: str
    """The engine's id of that prefill."""
    num_blocks: int
    """The number of these blocks; at least 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KvHandle:
    """A claim on one prompt's KV, held by one generation of a prefill node until it is read or its lease ends."""

    prefill_node: NodeRef
    engine_id: str
    request_id: str
    """The engine's id of the prefill."""
    block_ids: tuple[tuple[int, ...], ...]
    """The ids of the KV blocks: one tuple per KV cache group."""
    host: str
    port: int
    tp_size: int
    num_tokens: int
    """The number of prompt tokens whose KV is held."""
    prompt_digest: str
    """The digest of the prompt's token ids; 64 hex digits (`corun.receipt.prompt_digest`)."""
    reader: NodeRef
    """The one generation of a decode node that may read it by this handle."""
    binding: str = ""
    """The digest of all fields that name the KV, its owners or its reader; 64 hex digits (corun/node/kv/handle.py)."""
    claim: str = ""
    """The request id of the Prefill call that got this handle, since calls with equal prompts may share the KV of
    `request_id`. Empty: no other call shares it."""
    owners: tuple[KvOwner, ...] = ()
    """The prefills that computed the blocks, in the prompt's order. The last one is `request_id`, since the last block
    is never taken from the prefix cache."""
    cached_tokens: int = 0
    """The number of prompt tokens whose KV was in the node's prefix cache."""


class Freedom(str, enum.Enum):
    """A way to compute the contract's bits that is not the contract's own; a node needs a certificate for it."""

    ROWS = "rows"
    """Decode steps may have fewer rows than there are slots."""
    PACKED = "packed"
    """A prefill step may hold chunks of several prompts."""
    CONTEXTS = "contexts"
    """Prompts with a context, of which a part was computed or cached before, may share a step, too. It is part of
    `packed`: a node names it only if it holds `packed` without it."""
    CHUNKS = "chunks"
    """A prompt may be cut into chunks anywhere."""
    MIXED = "mixed"
    """Decode rows may be in a prefill step, on a colocated node."""
    SCORES = "scores"
    """Drawn tokens may be computed as a prompt, on a colocated node: their scores are what generation reported."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FreedomStatus:
    """Whether a node uses a freedom."""

    name: str
    """A value of `Freedom`, or a name that a later version has."""
    refused: str = ""
    """Why the node does not use it. Empty: it does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeInfo:
    """What a node says about itself when it joins."""

    ref: NodeRef
    role: NodeRole
    address: str
    """The address of the node's gRPC server as host:port."""
    contract_json: str
    """The canonical JSON of the node's contract (`corun.contract.Contract.canonical_json`)."""
    slots: int = 0
    """The number of a decode node's slots: the most rows of a step. 0 for a prefill node."""
    kv_blocks: int
    """The number of KV blocks that requests can use."""
    block_size: int
    """The number of tokens per KV block."""
    max_model_len: int
    """The most tokens of a prompt and its output together."""
    vocab_size: int
    nixl: NixlEndpoint | None = None
    """Where a prefill node's KV is read from. None for a decode node."""
    model: str
    """The path of the model, for the router's tokenizer."""
    finding: str = ""
    """What changed a bit in the node's self-test. Empty: the node passed and is certified."""
    freedoms: tuple[FreedomStatus, ...] = ()
    """The freedoms of the node's role. Empty: the node's version knows none."""
    certificate: str = ""
    """The digest of the certificate that the freedoms rest on; 64 hex digits. Empty: the node has none."""
    engine_id: str = ""
    """The id of the node's engine. A prefill and a decode node with the same one are the two sides of one colocated
    node: a sample's KV stays in place between them, and they end together. Empty: the node's version does not say."""
    step_tokens: int = 0
    """The most prompt tokens of a prefill node's step. 0 for a decode node, or if the node's version does not say:
    then routers take 4096."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KvReads:
    """The reads of KV from prefill nodes since a decode node's start, by its first tensor-parallel rank."""

    count: int = 0
    bytes: int = 0
    seconds: float = 0.0
    """The sum of the durations of all reads, each from its request to its completion. Parallel reads overlap."""
    failed: int = 0
    shared_tokens: int = 0
    """The number of prompt tokens that needed no read, since another sample of the prompt had read them."""
    prompt_tokens: int = 0
    """The number of prompt tokens of all samples whose KV has come, in whole blocks, shared ones included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeLoad:
    """How busy a node is. It travels with each heartbeat."""

    used_slots: int = 0
    """The number of samples that decode now, each in a slot of a decode node."""
    used_kv_blocks: int = 0
    queued_prompt_tokens: int = 0
    """The number of tokens of the prompts that a prefill node still has to compute."""
    steps: int = 0
    """The number of decode steps since the node's start."""
    tokens: int = 0
    """The number of prompt tokens computed, or of output tokens drawn, since the node's start. Prompt tokens from the
    prefix cache are not in it."""
    kv_reads: KvReads = KvReads()
    """The KV reads of a decode node; a few seconds old."""
    leases: int = 0
    """The number of leases that a decode node has granted: samples in slots, and those in line for one."""
    cached_tokens: int = 0
    """The number of prompt tokens that a prefill node took from its prefix cache since its start."""
    rows: int = 0
    """The number of rows that a decode node's steps have computed since its start, padding included."""
    used_rows: int = 0
    """The number of these rows that drew a token."""
    step_seconds: float = 0.0
    """The sum, since a decode node's start, of the times from one step's tokens to the next one's while samples run."""
    timed_steps: int = 0
    """The number of steps that `step_seconds` is about."""


GONE_AS_PLANNED = "gone as planned"
"""The detail of a LOST node that had announced that it would end."""


def state_in_words(state: NodeState, detail: str) -> str:
    """Return a node's state as text for people. A node that ended as planned is not called lost."""
    if detail == GONE_AS_PLANNED:
        return detail
    return f"{state.value}: {detail}" if detail else state.value


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotSamples:
    """A router's samples on a decode node, in columns. `places`, `decoding` and `ages_ms` have one entry for each."""

    places: tuple[int, ...] = ()
    """Where each sample is shown from its lease to its end. A place below the node's number of slots is one of the
    slots, the others are in line. The router chooses it; the engine's rows may have another order."""
    decoding: tuple[bool, ...] = ()
    """Whether each sample has a token of this run, and so a slot."""
    ages_ms: tuple[int, ...] = ()
    """The number of milliseconds since each sample's lease was granted."""
    others: int = 0
    """The number of leases that other routers hold, as of the last heartbeats."""
    told: tuple[int, ...] = ()
    """The indices, in the columns above, of the samples that the client may know more of. The columns below are about
    these."""
    request_ids: tuple[str, ...] = ()
    sample_indices: tuple[int, ...] = ()
    seeds: tuple[int, ...] = ()
    """Each sample's own seed."""
    num_tokens: tuple[int, ...] = ()
    """The number of output tokens of each sample's current run."""
    max_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeStatus:
    """A router's view of one node."""

    node: NodeInfo
    load: NodeLoad
    state: NodeState
    detail: str = ""
    """Why the node is not in use, or what a target of latency keeps from it. Empty if it takes all work."""
    last_heartbeat_ms: int = 0
    """The number of milliseconds since the node was last heard, less those in which the router stood still."""
    samples: SlotSamples | None = None
    """The router's samples on a decode node, if they were asked for."""

    @property
    def is_in_use(self) -> bool:
        """Whether the node is neither lost nor refused."""
        return self.state not in (NodeState.LOST, NodeState.REFUSED)

    @property
    def in_line(self) -> int:
        """The number of samples that have room on a decode node and no slot yet."""
        return max(0, self.load.leases - self.load.used_slots)


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditStatus:
    """The results of running finished samples again, since the router started."""

    matched: int = 0
    """The number of audits that gave the same bits."""
    mismatched: int = 0
    """The number of audits that gave other bits."""
    failed: int = 0
    """The number of audits that their nodes did not finish."""
    skipped: int = 0
    """The number of chosen samples that were not run again, for want of time or room."""
    same_node: int = 0
    """The number of matched and mismatched audits that used a node of the first run, because there was no other."""
    waiting: int = 0
    """The number of chosen samples that have no result yet."""
    last_mismatch: str = ""
    """The time, the sample and the nodes of the last mismatch. Empty if there was none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelStatus:
    """What clients need to know about the model that is served."""

    name: str
    """The model's name, without its path on the nodes' machines."""
    max_model_len: int
    """The most tokens of a prompt and its output together."""
    max_prompt_bytes: int
    """The most UTF-8 bytes of a text that can be a prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecialToken:
    """A special token that a chat template may name."""

    name: str
    """Its variable in the template, as bos_token."""
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateSource:
    """The chat template that a model brings, as text. `corun.chat` renders chats with it."""

    source: str
    """A jinja template. Empty if the model has none."""
    source_for_tools: str = ""
    """The template for chats with tools. Empty if it is the same."""
    special_tokens: tuple[SpecialToken, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """The tokens of a text."""

    token_ids: tuple[int, ...]
    tokens: tuple[str, ...]
    """Each token as the vocabulary spells it. Empty unless that was asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenScores:
    """What a prefill node computes of scored tokens. Each column has an entry for each token."""

    logprobs: tuple[float, ...]
    """The fp32 log probabilities; NaN if the logits are not finite."""
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]
    """The fp32 log probability of the likeliest token at each place."""
    cached_tokens: int = 0
    """The number of tokens whose KV was in the prefix cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution:
    """How often values were in which interval."""

    bounds: tuple[float, ...] = ()
    """The upper ends of the intervals, inclusive, ascending. The last interval has none."""
    counts: tuple[int, ...] = ()
    """The number of values in each interval: one count more than there are bounds."""
    sum: float = 0.0
    """The sum of all values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientStatus:
    """What a client has at a router now."""

    name: str
    """The name of its token or, without tokens, the host that it calls from."""
    weight: int = 1
    """Under load, clients share by their weights."""
    waiting_samples: int = 0
    """The number of its samples in the queue."""
    leased_samples: int = 0
    """The number of its samples with room on a decode node: in slots, and in line for one."""
    decoding_samples: int = 0
    """The number of these that have a token, and so a slot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterStatus:
    """The members of the cluster and how busy they are, as one router sees them."""

    router_id: str
    fingerprint: str
    """The fingerprint of the cluster's contract. Empty while no node has joined."""
    nodes: tuple[NodeStatus, ...]
    queued_samples: int
    """The number of samples that wait for room on nodes."""
    max_queued_samples: int
    finished_samples: int
    """The number of samples that have finished since the router started."""
    mismatches: int = 0
    """The number of samples whose repeated run gave other bits since the router started, audits included."""
    refused_requests: int = 0
    """The number of requests refused for want of room since the router started. It includes requests that were refused
    after they had waited."""
    audit: AuditStatus = AuditStatus()
    model: ModelStatus | None = None
    """The model that is served. None while no node has joined."""
    queued_prompt_tokens: int = 0
    """The number of prompt tokens of the samples that wait for room on nodes."""
    sample_retries: int = 0
    """The number of runs of samples that a node failed since the router started. The samples ran again."""
    first_token_seconds: Distribution | None = None
    """The seconds from a request's arrival to a sample's first token, since the router started. None: its version does
    not tell."""
    output_token_seconds: Distribution | None = None
    """The seconds per token after a sample's first one, the mean over each sample, since the router started."""
    clients: tuple[ClientStatus, ...] = ()
    """The clients that have samples, by name, if they were asked for: the caller alone, unless it is an operator."""

    @property
    def missing_roles(self) -> tuple[NodeRole, ...]:
        """The roles of which no node is ready. While there is one, no sample can start."""
        ready = {each.node.role for each in self.nodes if each.state is NodeState.READY}
        return tuple(role for role in NodeRole if role not in ready)

    @property
    def engines(self) -> tuple[tuple[NodeStatus, ...], ...]:
        """The nodes in their order, but those of one engine together: the sides of a colocated node."""
        found: dict[str, list[NodeStatus]] = {}
        for each in self.nodes:
            found.setdefault(each.node.engine_id or str(each.node.ref), []).append(each)
        return tuple(map(tuple, found.values()))


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumePoint:
    """How much of a sample a client has received when it asks for the rest."""

    sample_index: int
    seed: int
    """The sample's own seed, as it was received."""
    num_tokens: int
    """The number of tokens received."""
    output_digest: str
    """The output digest of the received tokens (`corun.receipt.OutputDigest`); 64 hex digits."""
    text_bytes: int
    """The number of UTF-8 bytes of text received."""
    done: bool = False
    """Whether the receipt was received, too. If so, the sample is not run again."""


def new_generation() -> str:
    """Return a fresh generation: 16 random hex digits."""
    return secrets.token_hex(8)


def from_plain(name: str, kind: Any, value: Any) -> Any:
    """Read a value of JSON as a `kind`: a dataclass, an enum, int, str or a tuple. name: its name in errors.

    Raises InvalidArgumentError for a value of another type, and for a field that is unknown or missing. The items of a
    tuple are for the dataclass to check.
    """
    if NoneType in get_args(kind):
        kind = get_args(kind)[0]
    if isinstance(kind, GenericAlias):
        return tuple(value) if isinstance(value, list) else value
    if kind in (int, str):
        if type(value) is not kind:
            raise InvalidArgumentError(name, value, f"must be {'an integer' if kind is int else 'text'}")
        return value
    if issubclass(kind, enum.Enum):
        try:
            return kind(value)
        except ValueError:
            known = ", ".join(member.value for member in kind)
            raise InvalidArgumentError(name, value, f"must be one of {known}") from None
    if not isinstance(value, Mapping):
        raise InvalidArgumentError(name, value, "must be an object")
    if unknown := sorted(map(str, set(value) - {field.name for field in fields(kind)})):
        raise InvalidArgumentError(f"{name}.{unknown[0]}", value.get(unknown[0]), "is not a known field")
    if missing := sorted({field.name for field in fields(kind) if field.default is MISSING} - set(value)):
        raise InvalidArgumentError(f"{name}.{missing[0]}", None, "must be set")
    hints = _hints(kind)
    return kind(**{key: from_plain(f"{name}.{key}", hints[key], value[key]) for key in value})


_hints = functools.cache(get_type_hints)
