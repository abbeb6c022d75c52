"""The plain values that cross process boundaries: who a node is, what it holds, how it does.

They mirror the messages in protos/corun/v1 field by field. This module must not know how they travel
(`corun.rpc.codec`) nor what anybody does with them.
"""

from __future__ import annotations

import enum
import secrets
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


class FinishReason(enum.Enum):
    """Why a sample ended."""

    STOP = "stop"
    """A stop string, a stop token or the end-of-sequence token."""
    LENGTH = "length"
    """max_tokens."""
    ERROR = "error"
    """Between router and node only: the sample must run again from its prompt."""


class Priority(enum.Enum):
    """Which of those that wait for a slot come first: best first. What runs is never touched."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"
    """When nobody else waits, and for as long as that takes."""


class NodeRole(enum.Enum):
    """What a node computes."""

    PREFILL = "prefill"
    DECODE = "decode"


class NodeState(enum.Enum):
    """Whether a router uses a node."""

    READY = "ready"
    JOINING = "joining"
    """Registered; its NIXL pairs are still being warmed."""
    LOST = "lost"
    """No heartbeat, or its step stream broke. A node that was told to end comes to this, too: `GONE_AS_PLANNED`."""
    REFUSED = "refused"
    """Its contract differs from the cluster's, it failed its self-test, or it may have given other bits."""
    DRAINING = "draining"
    """Takes no new work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRef:
    """One life of one node process. A restarted node has the same id and a new generation."""

    node_id: str
    generation: str
    """Random, 16 hex digits."""

    def __str__(self) -> str:
        return f"{self.node_id}@{self.generation}"


@dataclass(frozen=True, kw_only=True, slots=True)
class NixlEndpoint:
    """Where a prefill node's KV is read from."""

    engine_id: str
    """Unique to one generation."""
    host: str
    port: int
    tp_size: int
    stamp_addresses: tuple[int, ...] = ()
    """Of each rank's table of block stamps; known once the engine has started."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KvHandle:
    """A claim on one prompt's KV, held by one generation of a prefill node until it is read or its lease ends."""

    prefill_node: NodeRef
    engine_id: str
    request_id: str
    """The engine's id of the prefill."""
    block_ids: tuple[tuple[int, ...], ...]
    """One tuple per KV cache group."""
    host: str
    port: int
    tp_size: int
    num_tokens: int
    """Prompt tokens whose KV is held."""
    prompt_digest: str
    """Over the prompt's token ids; 64 hex digits (`corun.receipt.prompt_digest`)."""
    reader: NodeRef
    """The one generation of a decode node that may read it by this handle."""
    binding: str = ""
    """Over everything above that names the KV, its owner or its reader; 64 hex digits (corun/node/kv/handle.py)."""
    claim: str = ""
    """Of the prefill that got this handle: one of those that read this KV. Empty: there is no other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeInfo:
    """What a node says about itself when it joins."""

    ref: NodeRef
    role: NodeRole
    address: str
    """host:port of the node's gRPC server."""
    contract_json: str
    """Canonical JSON of the node's contract (`corun.contract.Contract.canonical_json`)."""
    slots: int = 0
    """Decode only."""
    kv_blocks: int
    """Blocks that requests can use."""
    block_size: int
    """Tokens per KV block."""
    max_model_len: int
    """Tokens, prompt and output together."""
    vocab_size: int
    nixl: NixlEndpoint | None = None
    """Prefill only."""
    model: str
    """Path of the model, for the router's tokenizer."""
    finding: str = ""
    """Of the node's self-test: what moved a bit. Empty: it is certified."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KvReads:
    """KV that a decode node has read from prefill nodes since its start; of its first tensor-parallel rank."""

    count: int = 0
    bytes: int = 0
    seconds: float = 0.0
    """Each read's own, from post to completion; those of parallel ones overlap."""
    failed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeLoad:
    """How busy a node is; travels with each heartbeat."""

    used_slots: int = 0
    """Decode only: leases held."""
    used_kv_blocks: int = 0
    queued_prompt_tokens: int = 0
    """Prefill only."""
    steps: int = 0
    """Decode steps since start."""
    tokens: int = 0
    """Prompt tokens computed, or output tokens drawn, since start."""
    slots_in_use: tuple[int, ...] = ()
    """Decode only: the leased slots, ascending."""
    kv_reads: KvReads = KvReads()
    """Decode only; a few seconds old."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """Samples of a router that wait for room on a decode node; it is told with the answer to a heartbeat."""

    router_id: str
    """As the router names itself when it reserves there."""
    samples: int = 0
    """The node's part of those that wait."""
    num_tokens: int = 0
    """Prompt and most output tokens of the first of them."""
    lasts_ms: int = 0
    """Unless the router says otherwise before."""


GONE_AS_PLANNED = "gone as planned"
"""The detail of a LOST node that had said before that it would end."""


def state_in_words(state: NodeState, detail: str) -> str:
    """A node's state for people, to whom a node that ended as planned is not lost."""
    if detail == GONE_AS_PLANNED:
        return detail
    return f"{state.value}: {detail}" if detail else state.value


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeStatus:
    """A router's view of one node."""

    node: NodeInfo
    load: NodeLoad
    state: NodeState
    detail: str = ""
    """Why the node is not in use; empty when it is."""
    last_heartbeat_ms: int = 0
    """Milliseconds ago."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditStatus:
    """What came of running finished samples again, since the router started."""

    matched: int = 0
    """Audits that gave the same bits."""
    mismatched: int = 0
    """Audits that gave other bits."""
    failed: int = 0
    """Audits that their nodes did not finish."""
    skipped: int = 0
    """Samples chosen that found no time or room."""
    same_node: int = 0
    """Of those matched or mismatched: how many used a node of the first run again, because there was no other."""
    waiting: int = 0
    """Samples chosen that have no answer yet."""
    last_mismatch: str = ""
    """When, which sample and which nodes; empty if there was none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelStatus:
    """What clients need to know of the model that is served."""

    name: str
    """Without the path that it has on the nodes' machines."""
    max_model_len: int
    """Tokens, prompt and output together."""
    max_prompt_bytes: int
    """UTF-8 bytes; no longer text can be a prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterStatus:
    """What the cluster is made of and how busy it is."""

    router_id: str
    fingerprint: str
    """Of the contract of the cluster; empty while no node has joined."""
    nodes: tuple[NodeStatus, ...]
    queued_samples: int
    """Waiting for a slot."""
    max_queued_samples: int
    finished_samples: int
    """Since the router started."""
    mismatches: int = 0
    """Samples whose repeated run gave other bits, audits included, since the router started."""
    refused_requests: int = 0
    """For want of room, since the router started; those that had waited are among them."""
    audit: AuditStatus = AuditStatus()
    model: ModelStatus | None = None
    """None while no node has joined."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumePoint:
    """How much of a sample a client has, when it comes back for the rest."""

    sample_index: int
    seed: int
    """The sample's own, as it was received."""
    num_tokens: int
    """Tokens received."""
    output_digest: str
    """Over them (`corun.receipt.OutputDigest`); 64 hex digits."""
    text_bytes: int
    """UTF-8 bytes of text received."""
    done: bool = False
    """The receipt was received too: the sample is not run again."""


def new_generation() -> str:
    """A fresh generation: 16 random hex digits."""
    return secrets.token_hex(8)


def new_node_id(role: NodeRole) -> str:
    """A node id for a process that was given none: hostname-role-random."""
    return f"{socket.gethostname()}-{role.value}-{secrets.token_hex(3)}"
