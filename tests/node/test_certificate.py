"""A certificate: what it holds, what it says, and what changes its digest."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from corun.config.fields import ColocatedConfig, DecodeConfig, PrefillConfig
from corun.contract import DecodeContract, ModelContract, PrefillContract
from corun.errors import InvalidArgumentError
from corun.node.certificate import CUT_APART, SELF_TEST_FAILED, Certificate, untested
from corun.types import Freedom, FreedomStatus, NodeRole
from decode_node import engine as decode

EVIDENCE: dict[str, Any] = {
    "steps": 350,
    "comparisons": 440,
    "products": 5,
    "algorithms": 300,
    "versions": ["vllm 0.26.0", "driver 580"],
    "seconds": [["heuristic", 2.5], ["steps", 8.0]],
}
BOTH = {Freedom.PACKED: "", Freedom.CHUNKS: ""}


def rank(packed: str = "", chunks: str = "", **evidence: Any) -> dict[str, Any]:
    """What a worker sends, after its way through msgpack."""
    sent = {"refused": {"packed": packed, "chunks": chunks}, "evidence": {**EVIDENCE, **evidence}}
    return dict(json.loads(json.dumps(sent)))


def test_a_freedom_is_held_if_no_rank_refuses_it() -> None:
    assert Certificate.of_ranks(BOTH, [rank(), rank()]).held == {"packed", "chunks"}
    found = Certificate.of_ranks(BOTH, [rank(), rank(chunks="the KV of layer 0 differs")])
    assert found.held == {"packed"}
    assert found.freedoms[1].refused == "rank 1: the KV of layer 0 differs"
    assert Certificate.of_ranks(BOTH, [rank(packed="rows")]).freedoms[0].refused == "rows"


def test_what_was_not_tested_says_why() -> None:
    why = {Freedom.PACKED: "switched off by --no-packed-prefill", Freedom.CHUNKS: ""}
    sent = rank()
    del sent["refused"]["packed"]
    found = Certificate.of_ranks(why, [sent])
    assert found.freedoms == (FreedomStatus(name="packed", refused=why[Freedom.PACKED]), FreedomStatus(name="chunks"))
    nothing = Certificate.of_ranks(dict.fromkeys(Freedom, "no"))
    assert nothing.held == frozenset()
    assert (nothing.evidence.steps, len(nothing.digest)) == (0, 64)


def test_the_digest_is_of_all_but_the_durations() -> None:
    one = Certificate.of_ranks(BOTH, [rank()])
    assert Certificate.of_ranks(BOTH, [rank(seconds=[["steps", 9.0]])]).digest == one.digest
    changes: tuple[dict[str, Any], ...] = ({"steps": 1}, {"comparisons": 1}, {"algorithms": 1}, {"versions": ["other"]})
    others = {Certificate.of_ranks(BOTH, [rank(**change)]).digest for change in changes}
    others |= {Certificate.of_ranks(BOTH, [rank(packed=reason)]).digest for reason in ("a", "b")}
    assert len(others - {one.digest}) == 6


def test_a_freedom_is_taken_away_for_a_reason() -> None:
    one = Certificate.of_ranks(BOTH, [rank(chunks="first")])
    after = one.without(Freedom.PACKED, "a prompt gave other bits in service").without(Freedom.CHUNKS, "later")
    assert after.held == frozenset()
    assert [freedom.refused for freedom in after.freedoms] == ["a prompt gave other bits in service", "first"]
    assert after.digest != one.digest
    with pytest.raises(InvalidArgumentError, match="reason"):
        one.without(Freedom.PACKED, "")


def test_a_log_line_says_all_of_it() -> None:
    text = str(Certificate.of_ranks(BOTH, [rank(chunks="the KV of layer 0")]))
    for words in ("packed;", "chunks is refused (the KV of layer 0)", "350 steps", "heuristic 2.50 s", "driver 580"):
        assert words in text


NO_PACKED, NO_CHUNKS, NO_ROWS = (
    f"switched off by --no-{setting}" for setting in ("packed-prefill", "free-chunks", "smaller-steps")
)


@pytest.mark.parametrize(
    ("role", "settings", "passed", "failed"),
    [
        ("prefill", {}, ["", ""], [SELF_TEST_FAILED] * 2),
        ("prefill", {"packed_prefill": False}, [NO_PACKED, ""], [NO_PACKED, SELF_TEST_FAILED]),
        ("prefill", {"packed_prefill": False, "free_chunks": False}, [NO_PACKED, NO_CHUNKS], [NO_PACKED, NO_CHUNKS]),
        ("decode", {}, [""], [SELF_TEST_FAILED]),
        ("decode", {"smaller_steps": False}, [NO_ROWS], [NO_ROWS]),
    ],
)
def test_settings_switch_freedoms_off_and_a_node_that_failed_its_self_test_tests_none(
    role: str, settings: dict[str, Any], passed: list[str], failed: list[str]
) -> None:
    names = [Freedom.PACKED, Freedom.CHUNKS] if role == "prefill" else [Freedom.ROWS]
    config = (PrefillConfig if role == "prefill" else DecodeConfig)(model="m", **settings)
    assert untested(config, NodeRole(role), "") == dict(zip(names, passed, strict=True))
    assert untested(config, NodeRole(role), "a difference") == dict(zip(names, failed, strict=True))


@pytest.mark.parametrize("split", ["none", "own-length"])
def test_rows_that_are_cut_ride_in_no_step_of_prompts(split: str) -> None:
    config = ColocatedConfig(model="m", decode_split=split)
    expected = "" if split == "none" else CUT_APART
    apart = dict.fromkeys((Freedom.MIXED, Freedom.SCORES), expected)
    assert untested(config, NodeRole.PREFILL, "") == {Freedom.PACKED: "", Freedom.CHUNKS: "", **apart}
    assert untested(config, NodeRole.DECODE, "") == {Freedom.ROWS: ""}
    off = untested(dataclasses.replace(config, mixed_steps=False), NodeRole.PREFILL, "")
    assert off[Freedom.MIXED] == "switched off by --no-mixed-steps"


class Llm:
    """The workers of an engine, which answer calls by name."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.calls: list[tuple[Any, ...]] = []

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append((method, *args))
        return list(self.answers.get(method, [None, None]))


def rows(sizes: list[int], reason: str = "") -> dict[str, Any]:
    return {"sizes": sizes, "refused": {"rows": reason}, "evidence": EVIDENCE}


async def test_ranks_that_disagree_on_rows_use_what_all_have_found() -> None:
    llm = Llm(certify_freedoms=[rows([1, 4, 16]), rows([4, 16, 32])])
    sizes, certificate = await decode.certify_rows(llm, "", None)
    assert (sizes, certificate.held) == ([4, 16], {"rows"})
    assert llm.calls == [("certify_freedoms", ["rows"]), ("use_rows", [4, 16])]
    sizes, certificate = await decode.certify_rows(Llm(certify_freedoms=[rows([1]), rows([2])]), "", None)
    assert (sizes, certificate.freedoms[0].refused) == ([], "the ranks agree on no number of rows")
    sizes, certificate = await decode.certify_rows(Llm(certify_freedoms=[rows([1]), rows([], "the logits")]), "", None)
    assert (sizes, certificate.freedoms[0].refused) == ([], "rank 1: the logits")


async def test_smaller_steps_that_are_switched_off_are_not_tested() -> None:
    llm = Llm()
    sizes, certificate = await decode.certify_rows(llm, "switched off by --no-smaller-steps", None)
    assert (sizes, certificate.held, llm.calls) == ([], frozenset(), [])


def test_freedoms_are_no_part_of_the_contract() -> None:
    """Nodes with other freedoms have the same fingerprint: they give the same bits."""
    names = {f.name for part in (ModelContract, PrefillContract, DecodeContract) for f in dataclasses.fields(part)}
    assert not names & {"freedoms", "certificate", "packed_prefill", "free_chunks", "smaller_steps"}
    contract_settings = {
        f.name
        for config in (PrefillConfig, DecodeConfig)
        for f in dataclasses.fields(config)
        if f.metadata.get("contract")
    }
    assert not contract_settings & {"packed_prefill", "free_chunks", "smaller_steps"}
