from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from corun.node.vllm.gpu_lock import DecodeTurn, PrefillTurn, lock_file


def lock_of(gpu: str, tmp_path: Path) -> Path:
    found = lock_file(gpu, tmp_path / "locks")
    assert found is not None
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return lock_of("GPU-1", tmp_path)


def test_decode_is_due_unless_prefill_computes_or_when_its_limit_has_passed(path: Path) -> None:
    prefill, decode, without_limit = PrefillTurn(path), DecodeTurn(path, 60.0), DecodeTurn(path, 0.0)
    prefill.hold(True)
    assert decode.wait(), "the first step waits for nothing"
    for turn in (decode, without_limit):
        turn.note_step()
    assert not decode.wait()
    assert without_limit.wait()
    prefill.hold(False)
    assert decode.wait()


def test_decode_sees_a_short_pause_of_prefill_while_it_waits(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode, slept = PrefillTurn(path), DecodeTurn(path, 60.0), list[float]()
    prefill.hold(True)

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        prefill.hold(len(slept) < 3)

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)  # A busy machine may take longer than the wait.
    decode.note_step()
    assert decode.wait()
    assert len(slept) == 3


def test_the_limit_counts_from_the_start_of_the_last_step(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(time, "sleep", sleep)
    prefill, decode = PrefillTurn(path), DecodeTurn(path, 0.1)
    prefill.hold(True)
    for passed, due in ((0.0, False), (0.09, False), (0.11, True), (5.0, True)):
        now = 1000.0
        decode.note_step()
        now += passed
        assert decode.wait() is due


def test_several_prefill_engines_and_other_gpus(path: Path, tmp_path: Path) -> None:
    """Holding again and leaving again change nothing."""
    first, second = PrefillTurn(path), PrefillTurn(path)
    here, elsewhere = DecodeTurn(path, 60.0), DecodeTurn(lock_of("GPU-2", tmp_path), 60.0)
    for turn in (first, first, second):
        turn.hold(True)
    assert elsewhere._is_free()
    for _ in range(2):
        first.hold(False)
        assert not here._is_free()
    second.hold(False)
    assert here._is_free()


def test_a_dead_prefill_engine_holds_nothing(path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from corun.node.vllm.gpu_lock import PrefillTurn; "
        "turn = PrefillTurn(Path(sys.argv[1])); turn.hold(True); print('held', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    decode = DecodeTurn(path, 60.0)
    assert not decode._is_free()
    process.kill()
    process.wait()
    process.stdout.close()
    assert decode._is_free()


def test_a_directory_that_is_not_ours_or_cannot_be_made_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert lock_file("GPU-1", tmp_path) is not None
    (tmp_path / "file").write_text("")
    assert lock_file("GPU-1", tmp_path / "file" / "locks") is None
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    assert lock_file("GPU-1", tmp_path) is None
