"""What each figure of the live page is, in words. One place, so that page, tests and docs cannot differ.

This module must not know how figures are computed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Definition:
    """A figure's name, what it means, and the metrics that show the same to Prometheus."""

    label: str
    text: str
    metrics: tuple[str, ...] = ()


WINDOW_S = 10
"""The seconds over which rates and times are taken, so that they neither jump nor lag."""
_RATE = f"Over the last {WINDOW_S} seconds."

DEFINITIONS = {
    "output_rate": Definition(
        "Output",
        f"Tokens that all decode nodes drew per second, for whatever router. {_RATE}",
        ("corun_decode_tokens_total",),
    ),
    "prompt_rate": Definition(
        "Prompts",
        "Prompt tokens that all prefill nodes computed per second. Those found in a prefix cache are not "
        f"computed, and not in it. {_RATE}",
        ("corun_prefill_prompt_tokens_total",),
    ),
    "ttft": Definition(
        "TTFT",
        "Time to first token: from a request's arrival at this router to its sample's first token, waiting for a "
        "slot and for other prompts included. The median and the 99th percentile of the samples that ended in "
        f"the last {WINDOW_S} seconds, or of all since the router started if there were none. They are read from a "
        "histogram, so they are as exact as its intervals.",
        ("corun_router_time_to_first_token_seconds",),
    ),
    "tpot": Definition(
        "TPOT",
        "Time per output token: the mean time between a finished sample's tokens after the first one. The median "
        f"and the 99th percentile of the samples that finished in the last {WINDOW_S} seconds, or of all since the "
        "router started if there were none.",
        ("corun_router_time_per_output_token_seconds",),
    ),
    "itl": Definition(
        "ITL",
        "Inter-token latency: the mean time from one decode step's tokens to the next one's while samples run, "
        f"over all decode nodes. {_RATE}",
        ("corun_decode_step_seconds",),
    ),
    "queue": Definition(
        "Queue",
        "Samples that wait at this router for room on nodes, and the prompt tokens that they have. Beyond the "
        "limit, requests are refused with a time to come back.",
        (
            "corun_router_queued_samples",
            "corun_router_queued_prompt_tokens",
        ),
    ),
    "backlog": Definition(
        "Prefill backlog",
        "Prompt tokens that prefill nodes have accepted and not computed yet.",
        ("corun_prefill_queued_prompt_tokens",),
    ),
    "cache": Definition(
        "Cache hits",
        "The share of prompt tokens whose KV was in a prefix cache already, of those cached or computed. Caching "
        f"changes no bit: a node uses it only where its certificate shows that. {_RATE}",
        (
            "corun_prefill_cached_tokens_total",
            "corun_prefill_prompt_tokens_total",
        ),
    ),
    "padding": Definition(
        "Padding",
        "The share of computed decode rows that drew no token: what steps of a fixed shape cost. A node that "
        f"holds the certificate for smaller steps pads less. {_RATE}",
        (
            "corun_decode_rows_total",
            "corun_decode_used_rows_total",
        ),
    ),
    "handoff": Definition(
        "Handoff",
        "KV that decode nodes read from prefill nodes per second, by NIXL, of the first rank of each. The two "
        f"sides of a colocated node hand nothing over. {_RATE}",
        (
            "corun_decode_kv_read_bytes_total",
            "corun_decode_kv_reads_total",
        ),
    ),
    "slots": Definition(
        "Slots",
        "A slot is a row of the decode batch; a sample has one from its first token to its last. Reserved: room "
        "is leased and the prompt is computed or read. Running: it decodes, and its square fills with its tokens. "
        "Draining: it decodes on a node that will end. A square stays a sample's until its end; the engine's rows "
        "may have another order. Samples in line have room and no slot yet. Details are shown to the client whose "
        "sample it is, and to operators.",
        (
            "corun_decode_used_slots",
            "corun_decode_leases",
        ),
    ),
    "kv": Definition(
        "KV in use",
        "Blocks of the KV cache that are held, of those that requests can use. Room for a sample's prompt and its "
        "longest output is held from its lease on, so nothing is ever preempted.",
        (
            "corun_decode_reserved_kv_blocks",
            "corun_prefill_held_kv_blocks",
        ),
    ),
    "finished": Definition(
        "Finished",
        "Samples that ended well, since this router started. Refused requests found no room.",
        (
            "corun_router_finished_samples_total",
            "corun_router_requests_total",
        ),
    ),
    "retries": Definition(
        "Failovers",
        "Runs of samples that a node failed or left, since this router started. Each ran again from its prompt "
        "with the same seed, and what its client had was checked against the new run, bit by bit.",
        ("corun_router_sample_retries_total",),
    ),
    "audits": Definition(
        "Audits",
        "Finished samples that were run again on other nodes, since this router started: how many gave the same "
        "bits, and how many other ones. A node that may have given wrong bits is taken out.",
        ("corun_router_audited_samples_total",),
    ),
    "mismatches": Definition(
        "Mismatches",
        "Samples whose repeated run gave other bits, since this router started: of audits, and of runs that went "
        "on after a node was lost. There should be none.",
        ("corun_router_mismatches_total",),
    ),
    "fingerprint": Definition(
        "Fingerprint",
        "The hash of the contract: everything that can change a bit. Every response carries it, and only nodes "
        "with this one serve here.",
        ("corun_router_info",),
    ),
    "generation": Definition(
        "Generation",
        "The name of one life of a node's process. A restarted node has the same id and a new generation.",
        ("corun_node_info",),
    ),
    "certificates": Definition(
        "Certificates",
        "Freedoms that the node's certificate shows, bit by bit on its own machine, to change nothing. A node "
        "computes those that it does not hold in the contract's own form: slower, and never different.",
        ("corun_node_freedom_held",),
    ),
}
"""The figures by their keys."""

FREEDOMS = {
    "rows": "smaller steps",
    "packed": "packed prompts",
    "contexts": "packed contexts",
    "chunks": "free chunks",
    "mixed": "mixed steps",
    "scores": "exact scores",
}
"""What a freedom is, in two words. One of a later version is shown by its name."""
