"""Audits over fake engines: which samples are chosen, when an audit runs or gives way, and what a difference does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import stat
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from corun import Client
from corun.cli.verify_report import Report, Verification
from corun.config.fields import RouterConfig
from corun.params import SamplingParams
from corun.receipt import output_digest
from corun.records import reproduction
from corun.records.reproduction import read_reproduction, write_reproduction
from corun.records.verification import NamedCase, case_from_reproduction
from corun.testing.engines import FakeDecodeEngine, expected
from corun.testing.nodes import LocalNode
from corun.types import AuditStatus, FinishReason, NodeState
from router.audit import auditor as audit
from router.audit.auditor import MAX_TRIES, MAX_WAITING, MAX_WAITING_TOKENS, Auditor, AuditOutput
from router.audit.idle import IdleRuns
from router.output import RECORD
from router.sample import Finished
from tests.chaos.fakes import under_chaos
from tests.clusters import FakeCluster, cluster, generate
from tests.router.asking import started

PROMPT = (5, 6, 7)
PARAMS = SamplingParams(max_tokens=20, logprobs=True)
LONG = SamplingParams(max_tokens=400)
ALL: dict[str, Any] = {"audit_fraction": 1.0, "heartbeat_timeout_ms": 30_000}  # No node is lost on a loaded machine.


async def audited(fake: FakeCluster, count: int) -> AuditStatus:
    """Return the audits' status, once `count` of them have a result and none waits."""

    def done() -> bool:
        status = fake.router.auditor.status()
        return status.matched + status.mismatched + status.failed >= count and not status.waiting

    await fake.until(done)
    return (await fake.status()).audit


@contextlib.contextmanager
def no_new_audits() -> Iterator[None]:
    """Start no audits in the block. Running ones go on; waiting ones start with the first heartbeat after the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit, "MAX_RUNNING", 0)
        yield


# The comparison


TOKENS = [(7, -0.5), (8, -1.5), (9, 0.0)]


def records(tokens: Sequence[tuple[int, float]]) -> bytes:
    return b"".join(RECORD.pack(*token) for token in tokens)


def compare(
    tokens: Sequence[tuple[int, float]], reason: FinishReason, *, was: FinishReason | None
) -> tuple[int | None, AuditOutput]:
    """Return where an audit's tokens and its end differ from a first run of `TOKENS`, and the audit's output."""
    finished = Finished(task=None, receipt=None, records=records(TOKENS), node_reason=was)  # type: ignore[arg-type]
    output = AuditOutput(finished)
    for token in tokens:
        if output.take(*token):
            break
    return output.differs_at(reason), output


@pytest.mark.parametrize(
    ("tokens", "reason", "differs_at"),
    [
        (TOKENS, FinishReason.LENGTH, None),
        (TOKENS, FinishReason.STOP, 3),
        (TOKENS[:2], FinishReason.LENGTH, 2),
        ([*TOKENS, (1, -1.0)], FinishReason.LENGTH, 3),
        ([(7, -0.5), (8, -1.25), (9, 0.0)], FinishReason.LENGTH, 1),
        ([(7, -0.5), (1, -1.5), (9, -0.5)], FinishReason.LENGTH, 1),
        ([(7, 0.0)], FinishReason.LENGTH, 0),
        ([*TOKENS[:2], (9, -0.0)], FinishReason.LENGTH, 2),
    ],
)
def test_every_bit_and_the_end_count(
    tokens: list[tuple[int, float]], reason: FinishReason, differs_at: int | None
) -> None:
    found, output = compare(tokens, reason, was=FinishReason.LENGTH)
    assert found == differs_at
    assert output.hexdigest() == output_digest([t for t, _ in tokens], [p for _, p in tokens])


def test_where_a_stop_string_ended_the_sample_the_audit_ends_too() -> None:
    differs_at, output = compare([*TOKENS, (1, -1.0), (2, -1.0)], FinishReason.STOP, was=None)
    assert (output.position, differs_at) == (3, None)
    assert compare(TOKENS[:2], FinishReason.LENGTH, was=None)[0] == 2


# Choosing


def auditor_of(fraction: float, seed: int = 1) -> Auditor:
    """An auditor of a cluster in which nothing is idle."""
    config = RouterConfig(audit_fraction=fraction)
    registry: Any = SimpleNamespace(place_idle=lambda need, spare_slots: None)
    queue: Any = SimpleNamespace(in_line=0)
    return Auditor(registry, IdleRuns(registry, queue, config), config, random.Random(seed))


@pytest.fixture
async def finished(model: str) -> Finished:
    """A sample that a router finished."""
    found: list[Finished] = []
    async with cluster(model) as fake:
        fake.router.context.on_finished = found.append
        await generate(fake, PROMPT, PARAMS, seed=8)
    return found[0]


async def test_a_share_is_chosen_at_random_and_nothing_with_0(finished: Finished) -> None:
    for fraction, low, high in ((0.0, 0, 0), (0.05, 20, 90), (1.0, MAX_WAITING, MAX_WAITING)):
        auditor = auditor_of(fraction)
        for _ in range(1000):
            auditor.note(finished)
        status = auditor.status()
        assert low <= status.waiting <= high
        assert status.skipped == (1000 - MAX_WAITING if fraction == 1.0 else 0)
    chosen = []
    for _ in range(2):
        auditor = auditor_of(0.05, seed=7)
        chosen.append([auditor.status().waiting for _ in range(200) if auditor.note(finished) is None])
    assert chosen[0] == chosen[1]


async def test_a_change_makes_no_parameters_for_an_audit_that_waits(
    finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be hundreds of changes while the streams wait, and parameters check themselves when they are made."""
    auditor, checks, check = auditor_of(1.0), list[SamplingParams](), SamplingParams.__post_init__

    def counted(params: SamplingParams) -> None:
        checks.append(params)
        check(params)

    monkeypatch.setattr(SamplingParams, "__post_init__", counted)
    auditor.note(finished)
    assert len(checks) == 1
    for _ in range(100):
        auditor.pump()
    assert (len(checks), auditor.waiting) == (1, 1)


async def test_what_waits_is_bounded_by_tokens_as_well(finished: Finished) -> None:
    auditor = auditor_of(1.0)
    tokens = MAX_WAITING_TOKENS // 3
    large = replace(finished, records=bytes(RECORD.size) * tokens)
    for _ in range(5):
        auditor.note(large)
    status = auditor.status()
    assert (status.waiting, status.skipped) == (2, 3)
    auditor.stop()
    auditor.note(finished)
    assert auditor.status() == AuditStatus(skipped=6)


# Over fakes


async def test_everything_is_audited_on_other_nodes_and_all_is_given_back(model: str) -> None:
    async with cluster(model, prefills=2, decodes=2, **ALL) as fake:
        runs = [generate(fake, (i, 2), replace(PARAMS, n=1 + i % 2), seed=i) for i in range(10)]
        with no_new_audits():  # So that no audit gives way and is computed twice.
            left = started(fake, (99, 2), LONG, seed=99)
            outputs = [output for outputs in await asyncio.gather(*runs) for output in outputs]
            assert left.cancel()  # Of a client that leaves there is nothing to audit.
            drawn = sum(len(output.token_ids) for output in outputs)
            await fake.until(lambda: not any(node.leases for node in fake.nodes[2:]))
            before = sum(node.drawn_tokens for node in fake.nodes[2:])
        status = await audited(fake, 15)
        assert status == AuditStatus(matched=15)
        assert len(outputs) == 15
        assert (await fake.status()).finished_samples == 15  # Audits are not among them.
        computed = [len(node.engine.prefilled) + node.service.metrics.shared_prompts.value for node in fake.nodes[:2]]
        assert sum(computed) == 30 + 1
        isolated = [prompt for node in fake.nodes[:2] for prompt in node.engine.isolated]
        assert sorted(isolated) == sorted((i, 2) for i in range(10) for _ in range(1 + i % 2))
        assert sum(node.drawn_tokens for node in fake.nodes[2:]) == before + drawn


async def test_another_node_is_waited_for_while_there_is_one(model: str) -> None:
    async with cluster(model, decodes=2, slots=1, **ALL) as fake:
        first = started(fake, (1, 1), LONG, seed=1)
        await fake.until(lambda: any(node.drawn_tokens for node in fake.nodes[1:]))
        (busy,) = (node for node in fake.nodes[1:] if node.leases)
        busy.engine.hanging = True
        (output,) = await generate(fake, PROMPT, PARAMS, seed=8)
        await asyncio.sleep(0.1)
        assert fake.router.auditor.status() == AuditStatus(waiting=1)  # Its own node is idle, but does not count.
        busy.engine.hanging = False
        await first
        status = await audited(fake, 2)
        assert (status.matched, status.same_node) == (2, 2)  # There is one prefill node only.
        assert {node.drawn_tokens for node in fake.nodes[1:]} == {len(output.token_ids) + 400}


@pytest.mark.parametrize(
    "change", [{"stop": (" ", "e")}, {"stop_token_ids": (3, 90, 200)}, {"stop": ("\ufffd",)}, {"min_tokens": 5}]
)
async def test_samples_that_end_in_any_way_match(model: str, change: dict[str, Any]) -> None:
    """A stop string ends a sample in the router, a stop token at the node, and a flush after the node's end."""
    async with cluster(model, **ALL) as fake:
        params = replace(PARAMS, max_tokens=60, **change)
        outputs = await asyncio.gather(*(generate(fake, (i, 9), params, seed=i) for i in range(12)))
        reasons = {output.receipt.finish_reason for (output,) in outputs}
        assert FinishReason.STOP in reasons or "min_tokens" in change
        assert (await audited(fake, 12)).matched == 12


async def test_a_sample_that_survived_its_node_is_audited_whole(model: str) -> None:
    async with cluster(model, decodes=2, **ALL) as fake:
        call = started(fake, PROMPT, replace(PARAMS, max_tokens=60), seed=8)
        await fake.until(lambda: any(node.drawn_tokens > 10 for node in fake.nodes[1:]))
        await next(node for node in fake.nodes[1:] if node.drawn_tokens).kill()
        await call
        status = await audited(fake, 1)
        assert (status.matched, status.same_node) == (1, 1)


# Giving way


async def start_audit(fake: FakeCluster) -> LocalNode:
    """Finish a sample, and return the decode node once the sample's audit decodes there."""
    node = fake.nodes[1]
    await generate(fake, PROMPT, LONG, seed=8)
    drawn = node.drawn_tokens
    await fake.until(lambda: node.leases == 1 and node.drawn_tokens > drawn + 3)
    return node


@pytest.mark.parametrize("gives_way", [True, False])
async def test_a_sample_gets_the_slot_that_an_audit_holds(
    model: str, gives_way: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And would wait for it, if audits did not give way."""
    if not gives_way:
        monkeypatch.setattr(IdleRuns, "_cancel", lambda idle, chosen: None)
    async with cluster(model, slots=1, max_queued_samples=1, **ALL) as fake:
        node, prefilled = await start_audit(fake), fake.nodes[0].engine.prefilled
        before = node.drawn_tokens
        node.engine.hanging = True  # So that the audit cannot end by itself.
        with no_new_audits():
            call = started(fake, (1, 2), PARAMS, seed=9)
            if gives_way:
                await fake.until(lambda: len(prefilled) == 3)  # The sample's turn has come.
            else:
                await fake.until(lambda: fake.router.queue.waiting == 1)
                await asyncio.sleep(0.3)
                assert (fake.router.queue.waiting, len(prefilled)) == (1, 2)
            node.engine.hanging = False
            (output,) = await call
            assert output.token_ids == expected((1, 2), PARAMS, 9)[0]
            assert not gives_way or node.drawn_tokens == before + 20
        assert (await audited(fake, 2)).matched == 2  # The audit that gave way is among them.


async def test_an_audit_leaves_a_prefill_node_that_gets_a_prompt(model: str) -> None:
    async with cluster(model, **ALL) as fake:
        prefill = fake.nodes[0]
        await generate(fake, PROMPT, PARAMS, seed=8)
        await audited(fake, 1)
        sample = started(fake, (3, 3), PARAMS, seed=9)
        await fake.until(lambda: (3, 3) in prefill.engine.prefilled)
        prefill.engine.hanging = True
        await sample
        await fake.until(lambda: prefill.queued_tokens == 2)  # Its audit is being prefilled.
        other = started(fake, (4, 4, 4), PARAMS, seed=10)
        await fake.until(lambda: prefill.queued_tokens == 3)  # The audit has left.
        assert (fake.router.auditor.status().waiting, fake.router.auditor._running) == (1, {})
        prefill.engine.hanging = False
        await other
        assert (await audited(fake, 3)).matched == 3


async def test_an_audit_that_never_gets_to_its_end_is_skipped(model: str) -> None:
    async with cluster(model, slots=1, **ALL) as fake:
        await generate(fake, PROMPT, LONG, seed=8)
        auditor = fake.router.auditor
        for number in range(1, MAX_TRIES + 1):
            await fake.until(lambda number=number: [each.tries for each in auditor._running.values()] == [number])
            fake.router.idle.give_way(None)
        await fake.until(lambda: not auditor.status().waiting)
        assert auditor.status() == AuditStatus(skipped=1)


async def test_audits_leave_slots_for_those_who_come(model: str) -> None:
    async with cluster(model, slots=8, **ALL) as fake:
        fake.nodes[1].engine.step_ms = 3
        await asyncio.gather(*(generate(fake, (i, 2), replace(PARAMS, max_tokens=60), seed=i) for i in range(8)))
        most = 0
        while fake.router.auditor.status().waiting:
            most = max(most, fake.nodes[1].leases)
            await asyncio.sleep(0.002)
        assert 0 < most <= 4
        assert fake.router.auditor.status().matched == 8


async def test_nobody_that_drains_waits_for_audits(model: str) -> None:
    async with cluster(model, slots=1, **ALL) as fake:
        node = await start_audit(fake)
        node.engine.hanging = node.agent.draining = True
        await fake.until(lambda: node.leases == 0)
        assert fake.router.auditor.status().waiting == 1
        node.agent.draining = node.engine.hanging = False
        assert (await audited(fake, 1)).matched == 1
        node = await start_audit(fake)
        node.engine.hanging = True
        began = asyncio.get_running_loop().time()
        await fake.router.drain()
        await fake.idle()
        assert asyncio.get_running_loop().time() - began < 30  # Any wait of an audit is longer.
        status = fake.router.auditor.status()
        assert (status.skipped, status.waiting) == (1, 0)


async def test_an_audit_that_a_node_fails_is_counted_and_forgotten(model: str) -> None:
    async with cluster(model, **ALL) as fake:
        await generate(fake, PROMPT, PARAMS, seed=8)
        await audited(fake, 1)
        with no_new_audits():
            await generate(fake, PROMPT, PARAMS, seed=9)
            fake.nodes[1].engine.fail_after = 2
        status = await audited(fake, 2)
        assert (status.matched, status.failed, status.mismatched) == (1, 1, 0)
        assert fake.state("d1") is NodeState.READY


async def test_an_audit_with_nothing_to_draw_from_differs(model: str, tmp_path: Path) -> None:
    """The first run did draw its tokens, so one of the two nodes is broken."""
    async with cluster(model, decodes=2, audit_dir=str(tmp_path), **ALL) as fake:
        fake.nodes[2].engine.not_finite = [7]
        await generate(fake, PROMPT, PARAMS, seed=8)
        status = await audited(fake, 1)
        assert (status.matched, status.failed, status.mismatched) == (0, 0, 1)
        assert "differs at token 7" in status.last_mismatch
        assert {fake.state(name) for name in ("p1", "d1", "d2")} == {NodeState.REFUSED}
        await fake.until(lambda: any(tmp_path.glob("audit-*.json")))
        row, *_ = read_reproduction(files(tmp_path)[0])
        assert row is not None


# A node that lies


def files(directory: Path) -> list[Path]:
    return sorted(directory.iterdir())


def replay(address: str, named: NamedCase) -> Report:
    with Client(address) as client:
        return Verification([named]).run(client)


async def lie(fake: FakeCluster) -> tuple[LocalNode, LocalNode]:
    """Run a sample at a decode node that lies, to be audited at one that does not; return both nodes."""
    decodes = [node for node in fake.nodes if isinstance(node.engine, FakeDecodeEngine)]
    liar, honest = decodes
    liar.engine.corrupt = True
    (output,) = await generate(fake, PROMPT, PARAMS, seed=8, request_id="lied")
    assert output.receipt.decode_node == liar.info.ref  # Both are empty, so the first by id is chosen.
    assert output.logprobs[0] == -1.0
    return liar, honest


async def test_a_node_that_lies_is_found(model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with cluster(model, prefills=2, decodes=2, audit_dir=str(tmp_path), **ALL) as fake:
        liar, honest = await lie(fake)
        status = await audited(fake, 1)
        assert (status.matched, status.mismatched, status.same_node) == (0, 1, 0)
        for text in ("sample 0 of request 'lied' differs at token 0", str(liar.info.ref), str(honest.info.ref)):
            assert text in status.last_mismatch
            assert text in caplog.text
        assert (await fake.status()).mismatches == 1
        assert {fake.state(name) for name in ("p1", "p2", "d1", "d2")} == {NodeState.REFUSED}  # One of two was wrong.
        assert fake.detail("d1") == "gave other bits for the audit of sample 0 of request 'lied'"
        await fake.until(lambda: any(tmp_path.glob("audit-*.json")))  # A file with its final name is whole.
        (path,) = files(tmp_path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        row = json.loads(path.read_text())
        right = expected(PROMPT, PARAMS, 8)
        assert (row["prompt"], row["seed"]) == (list(PROMPT), 8)
        assert row["audit"]["differs_at"] == 0
        assert row["audit"]["first_token"] == {"token_id": right[0][0], "logprob_bits": "bf800000"}
        assert row["audit"]["audit_token"]["token_id"] == right[0][0]
        assert row["receipt"]["decode_node"]["generation"] == liar.info.ref.generation
        assert row["audit"]["receipt"]["decode_node"]["generation"] == honest.info.ref.generation
        assert row["audit"]["receipt"]["output_digest"] == output_digest(right[0], right[1])
        named = case_from_reproduction(*read_reproduction(path))
        assert named.case.output_digest == output_digest(right[0], [-1.0] * 20)
        assert named.audit is not None
        assert named.audit.output_digest == output_digest(right[0], right[1])
        fake.router.auditor.stop()
        for node in fake.nodes:
            await node.kill()
        news = [await fake.add_prefill("p1"), await fake.add_decode("d1")]
        await fake.ready(*(str(node.info.ref) for node in news))
        report = await asyncio.to_thread(replay, fake.address, named)
        assert report.runs.total() == 4
        assert {d["reason"].rpartition(", ")[2] for d in report.differences} == {"as the audit did"}
        news[1].engine.corrupt = True
        assert (await asyncio.to_thread(replay, fake.address, named)).match


async def test_without_the_comparison_it_is_not(model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Negative control."""
    monkeypatch.setattr(AuditOutput, "differs_at", lambda output, reason: None)
    async with cluster(model, prefills=2, decodes=2, audit_dir=str(tmp_path), **ALL) as fake:
        await lie(fake)
        assert await audited(fake, 1) == AuditStatus(matched=1)
        assert {fake.state(name) for name in ("p1", "p2", "d1", "d2")} == {NodeState.READY}
        assert not files(tmp_path)


async def test_a_node_that_has_restarted_stays_and_explains_what_it_said(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "write_reproduction", None)  # Without a directory, nothing is written.
    async with cluster(model, prefills=2, decodes=2, **ALL) as fake:
        monkeypatch.setattr(audit, "MAX_RUNNING", 0)  # No audit starts yet.
        liar, honest = await lie(fake)
        await generate(fake, (9, 9), PARAMS, seed=9)
        assert fake.router.auditor.status().waiting == 2
        await liar.kill()
        new = await fake.add_decode("d1")
        await fake.ready(str(new.info.ref))
        monkeypatch.setattr(audit, "MAX_RUNNING", 1)
        await fake.until(lambda: fake.router.auditor.status().mismatched == 1)
        assert fake.state(str(new.info.ref)) is NodeState.JOINING  # There is no prefill node just now.
        assert {fake.state(name) for name in ("p1", "p2", "d2")} == {NodeState.REFUSED}
        for node in (*fake.nodes[:2], honest):
            await node.kill()
        news = [await fake.add_prefill("p1"), await fake.add_prefill("p2"), await fake.add_decode("d2")]
        await fake.ready(*(str(node.info.ref) for node in news))
        status = await audited(fake, 2)
        assert status.mismatched == 2  # For the liar's second sample, only dead generations are refused.
        assert {fake.state(name) for name in ("p1", "p2", "d1", "d2")} == {NodeState.READY}


async def test_files_are_whole_and_few(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduction, "MAX_FILES", 3)
    kept: list[Any] = []
    monkeypatch.setattr(audit, "write_reproduction", lambda directory, found: kept.append(found))
    async with cluster(model, prefills=2, decodes=2, audit_dir=str(tmp_path), **ALL) as fake:
        await lie(fake)
        await audited(fake, 1)
        await fake.until(lambda: kept)
    (tmp_path / "other").touch()
    for _ in range(5):
        write_reproduction(tmp_path, kept[0])
    assert [path.name[:6] for path in files(tmp_path)] == ["audit-"] * 3 + ["other"]


async def test_a_file_that_cannot_be_written_is_an_entry_in_the_log(
    model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "audits"
    directory.mkdir()
    async with cluster(model, prefills=2, decodes=2, audit_dir=str(directory), **ALL) as fake:
        directory.rmdir()
        await lie(fake)
        assert (await audited(fake, 1)).mismatched == 1
        await fake.until(lambda: "no reproduction of lied could be written" in caplog.text)


# Under faults


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_no_fault_makes_an_audit_differ(model: str) -> None:
    """Nodes die, stand still and fail under load while everything is audited."""
    async with under_chaos(model, 3, **{**ALL, "heartbeat_timeout_ms": 300}) as chaos:
        report = await chaos.run(chaos.plan(40), clients=4)
        assert (report.wrong, report.failed, report.leaked) == ([], [], [])
        auditor = chaos.target.fake.router.auditor
        await chaos.target.fake.until(lambda: not auditor.status().waiting)
        assert auditor.status().mismatched == 0
        assert auditor.status().matched > 0
