"""A node's next start uses what an earlier one found, and only with the same contract, engine, GPUs and code."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import corun
from corun.config.fields import PrefillConfig
from corun.models.files import cache
from corun.node import kept
from corun.node.life import Life
from corun.node.vllm import start, structure
from corun.types import Freedom
from tests.node.test_certificate import EVIDENCE

UNTESTED = {Freedom.PACKED: "", Freedom.CHUNKS: ""}
DECIDED_BY: dict[str, Any] = {"worker": "w", "contract": "{}", "seen": {"driver": "580"}, "engine": {"kv_blocks": 9}}
FOUND: list[dict[str, Any]] = [{"refused": {"packed": "", "chunks": "the logits"}, "evidence": EVIDENCE}]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kept, "folder", lambda: tmp_path / "certificates")
    return tmp_path / "certificates"


class Llm:
    """The one worker of an engine on a GPU."""

    def __init__(self, device: str = "GPU-1", uses_mla: bool = False) -> None:
        self.device = device
        self.tests = 0
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(use_mla=uses_mla))

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if method == "device_id":
            return [self.device]
        self.tests += 1
        return FOUND


def files(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.exists() else []


def kept_as(file: Path, found: Any) -> str:
    """Return the text of a file as it is kept."""
    return json.dumps({"found": found, "sha256": kept._digest(file, found)})


def write(file: Path, text: str) -> None:
    file.write_text(text)


async def tests_run(**changes: Any) -> int:
    """Return how many tests the start of a node runs."""
    llm = Llm(changes.pop("device", "GPU-1"))
    certificate, ranks = await start.certify_freedoms(llm, UNTESTED, DECIDED_BY | changes)
    assert (certificate.held, ranks) == ({"packed"}, FOUND)
    return llm.tests


async def test_the_next_start_tests_nothing_again() -> None:
    assert [await tests_run(), await tests_run()] == [1, 0]


@pytest.mark.parametrize("name", [*DECIDED_BY])
async def test_what_decides_the_outcome_is_in_the_name(name: str) -> None:
    await tests_run()
    assert await tests_run(**{name: "other"}) == 1


async def test_another_gpu_other_freedoms_and_other_code_are_tested(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    await tests_run()
    assert await tests_run(device="GPU-2") == 1
    llm = Llm()
    await start.certify_freedoms(llm, {Freedom.PACKED: ""}, DECIDED_BY)
    assert llm.tests == 1
    monkeypatch.setattr(kept, "code_digest", lambda: "other")
    assert await tests_run() == 1


async def test_without_keeping_each_start_is_tested(folder: Path) -> None:
    for _ in range(2):
        llm = Llm()
        await start.certify_freedoms(llm, UNTESTED, None)
        assert llm.tests == 1
    assert not files(folder)


def test_the_code_digest_follows_each_file(tmp_path: Path) -> None:
    assert kept.code_digest() == kept.code_digest(Path(corun.__file__).parents[1])
    shutil.copytree(Path(corun.__file__).parent / "node", tmp_path / "corun")
    before = kept.code_digest(tmp_path)
    (tmp_path / "corun" / "kept.py").write_text("")
    changed = kept.code_digest(tmp_path)
    (tmp_path / "corun" / "kept.py").rename(tmp_path / "corun" / "other.py")
    assert len({before, changed, kept.code_digest(tmp_path)}) == 3


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[{",
        "3",
        "[]",
        "{}",
        "[3]",
        "[" * 100_000,
        "\0",
        json.dumps(FOUND),
        json.dumps({"found": FOUND}),
        json.dumps({"found": FOUND, "sha256": "0" * 64}),
        kept_as(Path("another.json"), FOUND),
    ],
    ids=range(12),
)
async def test_a_file_that_cannot_be_read_is_not_used(
    folder: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    await tests_run()
    (file,) = files(folder)
    write(file, text)
    assert [await tests_run(), await tests_run()] == [1, 0]
    assert caplog.text.count("is not used") == 1


@pytest.mark.parametrize("place", range(0, 200, 20))
async def test_a_damaged_file_is_not_used(folder: Path, place: int) -> None:
    """A refusal that was lost would be a freedom that is held."""
    await tests_run()
    (file,) = files(folder)
    whole = file.read_bytes()
    file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    assert await tests_run() == 1
    file.write_bytes(whole[:place])
    assert [await tests_run(), await tests_run()] == [1, 0]


async def test_what_is_kept_gives_the_certificate_of_the_test() -> None:
    """Receipts carry its digest."""
    tested, kept_one = [await start.certify_freedoms(Llm(), UNTESTED, DECIDED_BY) for _ in range(2)]
    assert tested == kept_one
    assert tested[0].digest == kept_one[0].digest


async def test_a_certificate_says_that_contexts_of_mla_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only beside `packed`, and only with MLA: all other certificates, and what is kept, are as without it."""
    (plain, kept_plain), (mla, kept_mla) = [
        await start.certify_freedoms(Llm(uses_mla=uses_mla), UNTESTED, DECIDED_BY) for uses_mla in (False, True)
    ]
    assert kept_mla == kept_plain
    assert mla.freedoms == (*plain.freedoms, structure.CONTEXTS_ALONE)
    assert [one.name for one in plain.freedoms] == ["packed", "chunks"]
    assert mla.held == plain.held == {"packed"}
    assert mla.digest != plain.digest
    monkeypatch.setitem(FOUND[0], "refused", {"packed": "a bit", "chunks": ""})
    found, _ = await start.certify_freedoms(Llm(uses_mla=True), UNTESTED, None)
    assert [one.name for one in found.freedoms] == ["packed", "chunks"]


async def test_a_cache_that_cannot_be_written_costs_a_test(folder: Path) -> None:
    write(folder, "no folder")
    assert [await tests_run(), await tests_run()] == [1, 1]


async def test_only_whole_files_are_left(folder: Path) -> None:
    await tests_run()
    assert [file.suffix for file in files(folder)] == [".json"]


@pytest.mark.parametrize("told", ["_note_quarantine", "_note_finding"])
async def test_a_node_that_gave_wrong_bits_forgets(told: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a process that tests itself may follow it."""
    await tests_run()
    monkeypatch.setattr(Life, "_refuse_work", lambda self, reason: asyncio.sleep(0))
    life = Life(PrefillConfig(model="m"), [], SimpleNamespace(health=None))  # type: ignore[arg-type]
    getattr(life, told)("an audit had other bits")
    assert not files(folder)
    assert await tests_run() == 1


@pytest.mark.parametrize("told", ["_note_quarantine", "_note_finding"])
async def test_a_node_that_cannot_forget_leaves_service_all_the_same(
    told: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "a.json").mkdir(parents=True)  # No file, so it cannot be deleted as one.
    refused: list[str] = []

    async def refuse(self: Life, reason: str) -> None:
        refused.append(reason)

    monkeypatch.setattr(Life, "_refuse_work", refuse)
    life = Life(PrefillConfig(model="m"), [], SimpleNamespace(health=None))  # type: ignore[arg-type]
    getattr(life, told)("an audit had other bits")
    await asyncio.sleep(0)
    assert refused or life._ended.done()
    assert "the next start may use it" in caplog.text


def test_a_user_without_a_home_has_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that asks for it when it is quarantined must not fail then."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert cache() == Path("~/.cache/corun")


def deciding(cuda: str = "13.0", keep: bool = True, kv_blocks: int = 9000, **seen: Any) -> dict[str, Any] | None:
    """Return what decides the outcome on a node with this CUDA, this setting and room for so much KV, whose workers
    observe this."""
    llm = SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(worker_cls="w")))
    contract: Any = SimpleNamespace(model=SimpleNamespace(cuda=cuda), canonical_json=lambda: "{}")
    known = start.EngineFacts(
        kv_blocks=kv_blocks, block_size=16, step_tokens=8, max_model_len=8, vocab_size=8, eos_token_ids=(1,), finding=""
    )
    config = PrefillConfig(model="m", keep_certificates=keep)
    return start.deciding_facts(llm, config, contract, {"driver": "580"} | seen, known)


def test_certificates_are_kept_on_gpus() -> None:
    assert json.dumps(deciding())
    assert deciding(keep=False) is None
    assert deciding(cuda="") is None


def test_a_start_that_compiles_keeps_its_certificate_for_one_that_has_a_little_more_room() -> None:
    """As on an H200: 18,715 blocks in a start that compiled, and 18,958 in the next."""
    assert deciding(kv_blocks=18_715) == deciding(kv_blocks=18_958)
    assert deciding(kv_blocks=18_715) != deciding(kv_blocks=5000)


def test_a_start_that_compiles_keeps_its_certificate_for_one_that_does_not() -> None:
    """As on an H200: torch set the variable in the workers of the first start. The contract leaves it out, too."""
    assert deciding(variables={"TRITON_PTXAS_PATH": "/torch/bin/ptxas"}) == deciding(variables={})
    assert deciding(driver="580") != deciding(driver="590")


def test_two_starts_lines_show_what_differs() -> None:
    starts = [DECIDED_BY | {"seen": {"driver": driver}, "code": kept.code_digest()} for driver in ("580", "590")]
    one, other = (kept.parts(each).split(", ") for each in starts)
    assert [line.split()[0] for line in set(one) ^ set(other)] == ["seen", "seen"]
    assert "code" in one[-1]
