"""The arguments of a colocated node's engine."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from corun.config.fields import ColocatedConfig, DecodeConfig, PrefillConfig
from corun.errors import InvalidArgumentError
from corun.models import tiny
from corun.types import NixlEndpoint
from tests.loading import load

ENDPOINT = NixlEndpoint(engine_id="e", host="127.0.0.1", port=7000, tp_size=1)
SLOTS = 256


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """The engine arguments of a node of each kind, as on a GPU or a CPU. vLLM for CPUs knows no graphs."""
    load("vllm")
    base = load("corun.node.vllm.start")
    kinds = {
        "prefill": (load("prefill_node.engine"), PrefillConfig, {}),
        "decode": (load("decode_node.engine"), DecodeConfig, {"slots": SLOTS}),
        "colocated": (load("colocated_node.engine"), ColocatedConfig, {"slots": SLOTS}),
    }
    monkeypatch.setattr(base, "prepare", lambda *_: None)
    monkeypatch.setattr(base, "gpu_graphs", lambda *_: SimpleNamespace())
    monkeypatch.setattr(base, "gpu_attention", lambda made, split="none": split)

    def made(*, on_gpu: bool, chunk_size: int = 2048, **settings: Any) -> dict[str, Any]:
        monkeypatch.setattr(base, "on_gpu", lambda: on_gpu)
        found = {}
        for kind, (module, config, own) in kinds.items():
            chunks = {} if kind == "decode" else {"chunk_size": chunk_size}
            splits = {} if kind == "prefill" else settings
            found[kind] = module.arguments(config(model=str(tiny.ensure()), **own, **chunks, **splits), ENDPOINT)
        return found

    return made


@pytest.mark.parametrize(("chunk_size", "colocated"), [(128, 8192), (2048, 8192), (7936, 8192), (7937, 8193)])
def test_all_engines_on_a_gpu_are_compiled_for_one_number(
    arguments: Callable[..., dict[str, Any]], chunk_size: int, colocated: int
) -> None:
    """As long as a chunk leaves room for the rows of a colocated node. With another number bits differ, and then the
    contracts do, too. A prefill node's own steps are shorter."""
    made = arguments(on_gpu=True, chunk_size=chunk_size)
    sizes = {kind: one.max_num_batched_tokens for kind, one in made.items()}
    assert sizes == {"prefill": 8192, "decode": 8192, "colocated": colocated}
    assert made["prefill"].max_num_scheduled_tokens == max(4096, chunk_size)
    assert made["colocated"].max_num_scheduled_tokens is None


def test_engines_on_a_cpu_have_their_own_steps(arguments: Callable[..., dict[str, Any]]) -> None:
    sizes = {kind: one.max_num_batched_tokens for kind, one in arguments(on_gpu=False).items()}
    assert sizes == {"prefill": 4096, "decode": SLOTS, "colocated": 4096}


def test_a_colocated_node_may_cut_rows_by_their_own_length(arguments: Callable[..., dict[str, Any]]) -> None:
    made = arguments(on_gpu=True, decode_split="own-length")
    cuts = {kind: one.attention_config for kind, one in made.items()}
    assert cuts == {"prefill": "none", "decode": "own-length", "colocated": "own-length"}


def test_on_a_cpu_it_may_not(arguments: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(InvalidArgumentError, match="must be none on a CPU") as caught:
        arguments(on_gpu=False, decode_split="own-length")
    assert caught.value.field == "decode_split"


@pytest.mark.parametrize("step", [["sample", "prompt"], ["prompt", "sample"], ["sample"], ["prompt"]])
def test_a_step_s_tokens_are_taken_before_its_prompts(step: list[str]) -> None:
    """Whoever waits for them runs in this order: a first token is on its way before its prompt's answer is made. A
    prompt's token is no sample's, also if nobody waits for the prompt any more."""
    taken = list[tuple[str, list[str]]]()
    prefill = SimpleNamespace(take=lambda outputs: taken.append(("prefill", names(outputs))))
    decode = SimpleNamespace(take=lambda outputs: taken.append(("decode", names(outputs))))
    engine: Any = load("colocated_node.engine").ColocatedEngine(prefill=prefill, decode=decode)
    ends = {"sample": None, "prompt": {"corun_owners": []}}
    engine._take([SimpleNamespace(request_id=name, kv_transfer_params=ends[name]) for name in step])
    of_samples = [("decode", ["sample"])] if "sample" in step else []
    assert taken == [*of_samples, ("prefill", step)]


def names(outputs: list[Any]) -> list[str]:
    return [output.request_id for output in outputs]
