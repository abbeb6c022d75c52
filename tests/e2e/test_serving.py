"""What a user sees of the real cluster: streams, stops, refusals, and slots that come back."""

from __future__ import annotations

import math
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from corun import FinishReason, InvalidArgumentError, SamplingParams
from corun.processes import descendants
from corun.types import NodeRole
from corun.v1 import cluster_service_pb2, cluster_service_pb2_grpc, types_pb2
from tests.e2e.conftest import SLOTS, Cluster, ready, wait_until
from tests.machine import command_line

pytestmark = pytest.mark.e2e

FREE_S = 60.0
"""Twice vLLM's lease of KV, which ends what nobody has read."""


def test_stream_comes_in_pieces_that_add_up(cluster: Cluster) -> None:
    params = SamplingParams(max_tokens=200, temperature=1.0, logprobs=True, ignore_eos=True)
    with cluster.client() as client:
        chunks = list(client.stream("Once upon a time", params, seed=1))
        whole = client.generate("Once upon a time", params, seed=1)
    assert len(chunks) > 5
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == whole.token_ids
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason is FinishReason.LENGTH
    assert all(logprob <= 0 for logprob in whole.logprobs)
    assert len(whole.logprobs) == 200


def test_stop_string_ends_the_text_before_it(cluster: Cluster) -> None:
    params = SamplingParams(max_tokens=40, temperature=1.0, ignore_eos=True)
    with cluster.client() as client:
        free = client.generate("The girl", params, seed=5)
        stop = free.text[10:14]
        stopped = client.generate("The girl", SamplingParams(max_tokens=40, stop=stop, ignore_eos=True), seed=5)
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.text == free.text[: free.text.index(stop)]


def test_stop_token_ends_the_sample_and_is_kept(cluster: Cluster) -> None:
    with cluster.client() as client:
        free = client.generate("The girl", SamplingParams(max_tokens=20, ignore_eos=True), seed=6)
        wanted = free.token_ids[7]
        params = SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=[wanted])
        stopped = client.generate("The girl", params, seed=6)
    end = free.token_ids.index(wanted) + 1
    assert stopped.token_ids == free.token_ids[:end]
    assert stopped.finish_reason is FinishReason.STOP


def test_logit_bias_forbids_and_forces(cluster: Cluster) -> None:
    with cluster.client() as client:
        greedy = client.generate("A", SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
        ban = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logit_bias={greedy.token_ids[0]: -100.0})
        force = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logit_bias={77: 100.0})
        assert greedy.token_ids[0] not in client.generate("A", ban).token_ids
        assert client.generate("A", force).token_ids == (77, 77, 77)


def test_repetition_penalty_breaks_a_loop(cluster: Cluster) -> None:
    with cluster.client() as client:
        plain = client.generate([70] * 20, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, repetition_penalty=2.0)
        varied = client.generate([70] * 20, params)
    assert len(set(varied.token_ids)) > len(set(plain.token_ids))


CORNERS: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 0.01, 2),
    "top_p": (1e-9, 1),
    "top_k": (1, 2**31 - 1),
    "min_p": (0, 1),
    "min_tokens": (0, 6),
    "stop_token_ids": ((), range(64)),
    "ignore_eos": (False, True),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 2),
    "logit_bias": ({0: -100, 5: 100, 511: 100}, dict.fromkeys(range(512), 100), dict.fromkeys(range(512), -100)),
}
"""Every parameter of which there can be too much, at both of its limits."""


def corners(count: int) -> list[SamplingParams]:
    """Each corner with the defaults, then mixed; always the same ones."""
    chosen: list[dict[str, Any]] = [{name: value} for name, values in CORNERS.items() for value in values]
    draw = random.Random(0)
    chosen += [{name: draw.choice(values) for name, values in CORNERS.items()} for _ in range(count)]
    return [SamplingParams(max_tokens=6, logprobs=True, **fields) for fields in chosen]


def test_no_legal_parameter_ends_an_engine_or_moves_a_bit_beside_it(cluster: Cluster) -> None:
    """Nor is anything else than finite numbers drawn."""
    beside = SamplingParams(max_tokens=150, temperature=1.0, ignore_eos=True, logprobs=True)
    asked = corners(10)
    cores = [engine_core(cluster, name) for name in ("decode", "prefill")]
    with cluster.client() as client, ThreadPoolExecutor(SLOTS) as threads:
        alone = client.generate("Once upon a time", beside, seed=1)
        stream = threads.submit(client.generate, "Once upon a time", beside, seed=1)
        done = list(threads.map(lambda params: client.generate([5, 6, 7, 5], params, seed=2), asked))
        crowded = stream.result(60)
    assert (crowded.token_ids, crowded.logprobs) == (alone.token_ids, alone.logprobs)
    assert all(1 <= len(each.token_ids) <= 6 for each in done)
    assert all(math.isfinite(logprob) for each in done for logprob in each.logprobs)
    assert [engine_core(cluster, name) for name in ("decode", "prefill")] == cores


@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("prompt", lambda r: r.ClearField("text")),
        ("prompt", lambda r: setattr(r, "text", "")),
        ("prompt.token_ids[1]", lambda r: r.token_ids.ids.extend([5, 512])),
        ("seed", lambda r: setattr(r, "seed", 2**63)),
        ("request_id", lambda r: setattr(r, "request_id", "x" * 129)),
        ("sampling_params.temperature", lambda r: setattr(r.sampling_params, "temperature", math.nan)),
        ("sampling_params.temperature", lambda r: setattr(r.sampling_params, "temperature", -0.5)),
        ("sampling_params.temperature", lambda r: setattr(r.sampling_params, "temperature", 2.5)),
        ("sampling_params.temperature", lambda r: setattr(r.sampling_params, "temperature", 0.001)),
        ("sampling_params.repetition_penalty", lambda r: setattr(r.sampling_params, "repetition_penalty", 1e-40)),
        ("sampling_params.top_p", lambda r: setattr(r.sampling_params, "top_p", 0.0)),
        ("sampling_params.top_p", lambda r: setattr(r.sampling_params, "top_p", 1.5)),
        ("sampling_params.max_tokens", lambda r: setattr(r.sampling_params, "max_tokens", 0)),
        ("sampling_params.max_tokens", lambda r: setattr(r.sampling_params, "max_tokens", 8192)),
        ("sampling_params.stop", lambda r: r.sampling_params.stop.extend(["x"] * 1000)),
        ("sampling_params.n", lambda r: setattr(r.sampling_params, "n", 0)),
    ],
)
def test_bad_input_is_refused_by_name(cluster: Cluster, field: str, make: object) -> None:
    request = cluster_service_pb2.GenerateRequest(text="Once", sampling_params=types_pb2.SamplingParams(max_tokens=4))
    make(request)  # type: ignore[operator]
    from corun.errors import from_rpc_error

    with grpc.insecure_channel(cluster.address) as channel:
        stub = cluster_service_pb2_grpc.ClusterServiceStub(channel)
        with pytest.raises(grpc.RpcError) as failure:
            list(stub.Generate(request, timeout=20))
    error = from_rpc_error(failure.value)
    assert isinstance(error, InvalidArgumentError), error
    assert error.field == field
    assert error.limit
    assert cluster.status().queued_samples == 0


def test_a_negative_seed_is_refused_by_the_sdk(cluster: Cluster) -> None:
    with cluster.client() as client, pytest.raises(InvalidArgumentError, match=r"seed = -1: must be in \[0, 2\^63\)"):
        client.generate("Once", seed=-1)


def test_an_oversized_message_is_refused(cluster: Cluster) -> None:
    with cluster.client() as client, pytest.raises(InvalidArgumentError, match="16777216"):
        client.generate("a" * (20 * 1024 * 1024))


def test_a_client_that_goes_away_frees_slot_and_kv(cluster: Cluster) -> None:
    params = SamplingParams(max_tokens=4000, ignore_eos=True)

    def leave_early(seed: int) -> None:
        with cluster.client() as client:
            stream = client.stream([5] * 200, params, seed=seed)
            next(stream)
            stream.close()

    clients = [threading.Thread(target=leave_early, args=(seed,)) for seed in range(2 * SLOTS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join(60)
    wait_until(lambda: idle(cluster), "all slots and KV are free again", FREE_S)
    with cluster.client() as client:  # and they work
        assert len(client.generate("Once", SamplingParams(max_tokens=3, ignore_eos=True)).token_ids) == 3


def idle(cluster: Cluster) -> bool:
    status = cluster.status()
    loads = {node.node.role: node.load for node in status.nodes}
    decode, prefill = loads[NodeRole.DECODE], loads[NodeRole.PREFILL]
    held = decode.used_slots + decode.used_kv_blocks + prefill.used_kv_blocks + prefill.queued_prompt_tokens
    return held + status.queued_samples == 0


def test_a_deadline_frees_everything(cluster: Cluster) -> None:
    from corun import DeadlineError

    started = time.monotonic()
    with cluster.client() as client, pytest.raises(DeadlineError):
        client.generate("Once", SamplingParams(max_tokens=8000, ignore_eos=True), timeout_s=1.0)
    assert time.monotonic() - started < 30  # Without the deadline it takes a minute or more.
    wait_until(lambda: idle(cluster), "all slots and KV are free again", FREE_S)


@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_a_stopped_engine_is_noticed_in_seconds_and_comes_back(cluster: Cluster, name: str) -> None:
    """The core of an engine is stopped; its node goes on to answer, and says so. The sample ends with the same bits."""
    params = SamplingParams(max_tokens=900, temperature=1.0, ignore_eos=True, logprobs=True)
    prompt = [5] * 200
    with cluster.client() as client:
        whole = client.generate(prompt, params, seed=7)
        stream = client.stream(prompt, params, seed=7)
        tokens = [*next(stream).token_ids]
        core = engine_core(cluster, name)
        stopped_at = time.monotonic()
        os.kill(core, signal.SIGSTOP)
        try:
            wait_until(lambda: "its engine is stuck" in detail(cluster, name), "the stuck engine is known", 60)
            noticed_s = time.monotonic() - stopped_at
        finally:
            os.kill(core, signal.SIGCONT)
        wait_until(lambda: ready(cluster.status), "the engine is used again")
        tokens += [token for chunk in stream for token in chunk.token_ids]
    assert tuple(tokens) == whole.token_ids
    again_s = time.monotonic() - stopped_at - noticed_s
    print(f"{name}: noticed after {noticed_s:.1f} s, used again and done {again_s:.1f} s later")
    assert 5 <= noticed_s < 20  # 5 s, a second until the next question, and what a busy machine takes.
    wait_until(lambda: idle(cluster), "all slots and KV are free again", FREE_S)


def engine_core(cluster: Cluster, name: str) -> int:
    """The process of a node's engine core: vLLM names it so."""
    pids = descendants(cluster.processes.running[name].pid)
    (core,) = [pid for pid in pids if "EngineCore" in command_line(pid)]
    return core


def detail(cluster: Cluster, role: str) -> str:
    (status,) = [status for status in cluster.status().nodes if status.node.role.value == role]
    return status.detail
