"""The suite's own parts: topologies, edges, verdicts, time limits, and the pairs of the handoff benchmark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from corun import Client
from corun.config.fields import ColocatedConfig, DecodeConfig, PrefillConfig
from corun.config.flags import parse
from corun.errors import CorunError, UnavailableError
from corun.types import NodeState
from corun_bench import nodes
from corun_bench.children import Processes
from tests.e2e.stock import read, results_of
from tests.gpu.checks import STYLES, Bench, Check, Found, Prompts, edge_lengths, sampling
from tests.gpu.handoff import pairs
from tests.gpu.outputs import Outputs
from tests.gpu.report import Outcome, Report
from tests.gpu.start import BEFORE, Watch
from tests.gpu.suite import Run, Suite, for_stock, log_lines, stock_sets
from tests.nodes import CONFIGS, FREEDOMS, Nodes, Topology


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "has_gpu", lambda: True)


def test_gpus_are_shared_out_to_nodes() -> None:
    both = Topology(model="tiny", prefill_gpus=(0, 1), decode_gpus=(0, 1))
    assert [(node.name, node.gpus) for node in both.nodes] == [("p0", (0,)), ("p1", (1,)), ("d0", (0,)), ("d1", (1,))]
    split = Topology(model="tiny", prefill_gpus=(0, 1), decode_gpus=(2, 3), tensor_parallel_size=2)
    assert [(node.name, node.gpus) for node in split.nodes] == [("p0", (0, 1)), ("d0", (2, 3))]
    mixed = Topology(model="tiny", prefill_gpus=(0,), decode_gpus=(1,), colocated_gpus=(2, 3))
    assert [(node.name, node.gpus) for node in mixed.nodes] == [("p0", (0,)), ("d0", (1,)), ("c0", (2,)), ("c1", (3,))]
    assert mixed.node_ids == {"p0", "d0", "c0-prefill", "c0-decode", "c1-prefill", "c1-decode"}
    alone = Topology(model="tiny", colocated_gpus=(0,))
    assert [(node.name, node.module, node.gpus) for node in alone.nodes] == [("c0", "colocated_node", (0,))]
    lent = Topology(model="tiny", prefill_gpus=(1,), colocated_gpus=(0,))
    assert [node.name for node in lent.nodes] == ["p0", "c0"]
    with pytest.raises(ValueError, match="there must be a decode_node or a colocated_node"):
        _ = Topology(model="tiny", decode_gpus=()).nodes
    with pytest.raises(ValueError, match="cannot be shared out"):
        _ = Topology(model="tiny", prefill_gpus=(0, 1, 2), tensor_parallel_size=2).nodes


@pytest.mark.parametrize(
    ("topology", "share"),
    [
        (Topology(model="tiny"), 0.42),
        (Topology(model="tiny", decode_gpus=(1,)), 0.84),
        (Topology(model="tiny", gpu_memory_utilization=0.47), 0.47),
        (Topology(model="tiny", colocated_gpus=(0,)), 0.84),
    ],
)
def test_nodes_share_the_memory_of_a_gpu(topology: Topology, share: float, on_gpu: None) -> None:
    for node in topology.nodes:
        flags = topology.flags(node)
        assert flags[flags.index("--gpu-memory-utilization") + 1] == str(share)


@pytest.mark.parametrize(
    ("freedoms", "prefill", "decode"),
    [
        ("all", set(), set()),
        ("none", {"packed", "chunks", "cached"}, {"rows", "cached"}),
        ("rows", {"packed", "chunks", "cached"}, {"cached"}),
        ("packed", {"chunks", "cached"}, {"rows", "cached"}),
        ("cached", {"packed", "chunks"}, {"rows"}),
        ("mixed", {"packed", "chunks", "cached"}, {"rows", "cached"}),
    ],
)
def test_what_was_not_asked_for_is_switched_off(freedoms: Any, prefill: set[str], decode: set[str]) -> None:
    """A node that does not have a setting is not given it."""
    topology = Topology(model="tiny", freedoms=freedoms, prefill_gpus=(0,), decode_gpus=(0,), colocated_gpus=(1,))
    mixed = {"mixed"} - {freedoms} if freedoms != "all" else set()
    for node, off in zip(topology.nodes, (prefill, decode, prefill | decode | mixed), strict=True):
        flags = {flag for flag in topology.flags(node) if flag.startswith("--no-")} - {"--no-keep-certificates"}
        assert flags == {f"--no-{FREEDOMS[name].replace('_', '-')}" for name in off}


@pytest.mark.parametrize("keeps", [{}, {"keep_certificates": True}])
def test_nodes_test_themselves_anew_unless_a_start_is_measured(keeps: dict[str, bool]) -> None:
    topology = Topology(model="tiny", colocated_gpus=(0,), prefill_gpus=(1,), decode_gpus=(1,), **keeps)
    configs = [parse(CONFIGS[node.module], topology.flags(node)) for node in topology.nodes]
    assert [config.keep_certificates for config in configs] == [bool(keeps)] * 3


@pytest.mark.parametrize("freedoms", ["all", "none", *FREEDOMS])
def test_nodes_take_the_flags_of_a_topology(freedoms: Any) -> None:
    gpus: dict[str, Any] = {"prefill_gpus": (0,), "decode_gpus": (0,), "colocated_gpus": (1,)}
    topology = Topology(model="tiny", freedoms=freedoms, **gpus)
    prefill, decode, colocated = (parse(CONFIGS[node.module], topology.flags(node)) for node in topology.nodes)
    assert isinstance(prefill, PrefillConfig)
    assert isinstance(decode, DecodeConfig)
    assert isinstance(colocated, ColocatedConfig)
    assert (colocated.slots, colocated.chunk_size) == (decode.slots, prefill.chunk_size)
    assert decode.smaller_steps == colocated.smaller_steps == (freedoms in ("all", "rows"))
    assert colocated.mixed_steps == (freedoms in ("all", "mixed"))
    split = Topology(model="tiny", decode_split="own-length")
    assert parse(DecodeConfig, split.flags(split.nodes[1])).decode_split == "own-length"


def test_runs_are_compared_by_the_bits_of_their_cases() -> None:
    def generation(*tokens: int) -> Any:
        return SimpleNamespace(token_ids=tokens, samples=[SimpleNamespace(token_ids=tokens, logprobs=(-1.0,))])

    cases = [([1, 2], sampling(), seed) for seed in (7, 8)]
    first, again, other = Outputs(), Outputs(), Outputs()
    first.note(cases, [generation(4), generation(5)])
    first.note(cases, [generation(6), generation(5)])  # A difference within the run is for a check to find.
    again.note(cases[::-1], [generation(5), generation(4)])
    other.note(cases, [generation(4), generation(9)])
    assert first.digest == again.digest != other.digest
    assert (first.tokens, again.tokens) == (4, 2)
    assert [found.verdict for found in again.against(first.found)] == ["equal"]
    assert [(found.equal, found.verdict) for found in other.against(first.found)] == [(1, "DIFFERENT")]
    assert [found.verdict for found in Outputs().against(first.found)] == ["DIFFERENT"], "nothing was compared"
    part = Outputs()
    part.note(cases[:1], [generation(4)])
    assert [found.verdict for found in first.against(part.found)] == ["equal", "skipped"]


def test_nodes_on_one_gpu_start_side_by_side(on_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    cluster = Nodes(Topology(model="tiny", prefill_gpus=(0, 1), decode_gpus=(0, 2)), Processes(tmp_path))
    monkeypatch.setattr(cluster.processes, "start", lambda name, *_, **__: started.append(name))
    monkeypatch.setattr(cluster, "status", cluster._stopped.set)
    with pytest.raises(UnavailableError, match="stopped while it started"):
        cluster.start()
    assert started == ["router", "p0", "p1", "d0", "d1"]


def test_a_colocated_node_has_joined_with_both_its_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready: dict[str, str] = {}
    cluster = Nodes(Topology(model="tiny", colocated_gpus=(0,)), Processes(tmp_path))
    monkeypatch.setattr(
        cluster,
        "_nodes",
        lambda: [
            SimpleNamespace(
                state=NodeState.READY, node=SimpleNamespace(ref=SimpleNamespace(node_id=name, generation=generation))
            )
            for name, generation in ready.items()
        ],
    )
    cluster.started["c0"] = 0.0
    (plan,) = cluster.topology.nodes
    for name in plan.node_ids:
        assert not cluster.all_ready()
        assert cluster.seconds == {}
        ready[name] = "g1"
    assert cluster.all_ready()
    assert len(cluster.seconds["c0"]) == 1
    assert cluster.generation(plan) == "g1"


def test_the_stages_of_a_start_are_timed_by_the_logs(tmp_path: Path) -> None:
    logs = {name: tmp_path / f"{name}.log" for name in ("p0", "d0")}
    watch = Watch(logs, began=10.0)
    watch.look(11.0)  # Nothing is written yet.
    for at, words in ((12.5, "stage: importing vLLM\nINFO x\n"), (14.0, "more\n"), (20.0, "stage: loading\n")):
        with logs["p0"].open("a") as log:
            log.write(words)
        watch.look(at)
    assert watch.seconds(21.0) == {"p0": {BEFORE: 2.5, "importing vLLM": 7.5, "loading": 1.0}, "d0": {BEFORE: 11.0}}


def test_edges_lie_on_both_sides() -> None:
    assert edge_lengths(64, (16, 64), 150) == [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129]
    assert {2047, 2048, 2049, 4097} <= {*edge_lengths(2048, (), 8000)}


def test_the_papers_prompts_are_the_same_for_cluster_and_control() -> None:
    first, again = (Prompts(vocab=1000, model_len=4096).paper() for _ in range(2))
    assert first == again
    assert len(first) == 32
    assert {seed for _, _, seed in first} == {42}
    assert all(64 <= len(prompt) <= 512 for prompt, _, _ in first)


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        ([Outcome(name="a", total=2, equal=2)], 0),
        ([Outcome(name="a", total=2, equal=2), Outcome(name="b", total=2, equal=1), Outcome(name="c", error="x")], 3),
        ([Outcome(name="a", total=2, equal=2), Outcome(name="c", error="x")], 1),
        ([Outcome(name="a", total=2, equal=2), Outcome(name="c", skipped="no time left")], 1),
        ([Outcome(name="control", total=2, equal=1, must_differ=True)], 0),
        ([Outcome(name="control", total=2, equal=2, must_differ=True)], 1),
        ([Outcome(name="nothing was compared")], 3),
        ([], 1),
    ],
)
def test_exit_code(outcomes: list[Outcome], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(tmp_path / "report.json")
    for outcome in outcomes:
        report.add(outcome)
    report.say(start_s=1.0)
    report.show()
    assert report.exit_code == code
    written = json.loads((tmp_path / "report.json").read_text())
    assert [check["check"] for check in written["checks"]] == [outcome.name for outcome in outcomes]
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert lines[-1] == {"start_s": 1.0}


def hangs(bench: Bench) -> Iterator[Found]:
    yield Outcome(name="before", total=1, equal=1)
    bench.client.generate([1])


def fails(bench: Bench) -> Iterator[Found]:
    raise CorunError("broken")
    yield {}


@pytest.mark.parametrize(
    ("work", "left_s", "verdicts", "words"),
    [
        (hangs, 560.0, ["equal", "ERROR"], "(its 1 s were over)"),
        (fails, 560.0, ["ERROR"], "CorunError: broken"),
        (hangs, 25.0, ["skipped"], ""),
    ],
)
def test_a_check_ends_within_its_time_and_its_error_is_a_result(
    monkeypatch: pytest.MonkeyPatch, work: Any, left_s: float, verdicts: list[str], words: str
) -> None:
    client = Client("127.0.0.1:1", connect_timeout_s=60.0)  # Nobody answers there.
    monkeypatch.setattr(Run, "_bench", lambda self, cluster, client, deadline: SimpleNamespace(client=client))
    run = Run(Suite(topology=Topology(model="tiny"), stock="off", time_limit_s=left_s))
    cluster: Any = SimpleNamespace(client=lambda timeout_s: client)
    run.check(Check(work, limit_s=1.0, least_s=0.5), cluster)
    assert [outcome.verdict for outcome in run.report.outcomes] == verdicts
    assert run.report.outcomes[-1].seconds < 5
    assert words in run.report.outcomes[-1].error


def test_lines_of_interest_are_taken_from_logs(tmp_path: Path) -> None:
    log = tmp_path / "d0.log"
    log.write_text(
        "a\nINFO certified in 3.21 s\nINFO certified in 3.21 s\nweights digest: 2 s\nb\nKV reads of rank 0: x\n"
    )
    assert log_lines([log]) == {"d0": ["INFO certified in 3.21 s", "weights digest: 2 s", "KV reads of rank 0: x"]}


def test_pairs_that_are_measured() -> None:
    assert [pair.name for pair in pairs(0)] == ["host memory"]
    assert len(pairs(1)) == 2
    assert {pair.visible for pair in pairs(2)} == {("0", "0"), ("0", "1"), ("0,1", "0,1")}


def test_results_of_stock_are_found_among_its_log() -> None:
    log = 'INFO x\n{"start_s": 2.0}\n{"set": "paper", "prompts": 2, "equal": 1}\nbye\n'
    assert results_of(log) == {"paper": {"prompts": 2, "equal": 1}}
    assert results_of("INFO x\n") == {}


def test_stock_vllm_gets_the_prompts_of_checks(tmp_path: Path) -> None:
    """With all that is asked of a style; it reads them from a file."""
    sets = stock_sets(Topology(model="tiny"))
    assert list(sets) == ["paper", "mixed", "edges", "ragged"]
    (tmp_path / "cases.json").write_text(
        json.dumps({name: [for_stock(*case) for case in made] for name, made in sets.items()})
    )
    found = read(tmp_path / "cases.json")
    assert [len(cases) for cases in found.values()] == [len(cases) for cases in sets.values()]
    asked = {key for case in found["mixed"] for key in case.params}
    assert asked == {"temperature", "max_tokens"} | {key for style in STYLES for key in style}
    params = [case.params for case in found["mixed"]]
    assert {"min_p": 0.05, "max_tokens": 32} in params
    assert {"logit_bias": {40: 4.0}, "max_tokens": 32} in params
