from __future__ import annotations

import os
import subprocess
import sys
import threading
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


def waited(turn: DecodeTurn) -> float:
    began = time.monotonic()
    turn.wait()
    return time.monotonic() - began


def waits(turn: DecodeTurn) -> bool:
    """Whether the turn sleeps at all before its step."""

    def sleep(_: float) -> None:
        raise InterruptedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", sleep)
        try:
            turn.wait()
        except InterruptedError:
            return True
    return False


def test_decode_waits_while_prefill_computes_and_no_longer_than_its_limit(path: Path) -> None:
    prefill, decode, due = PrefillTurn(path), DecodeTurn(path, 0.5), DecodeTurn(path, 0.01)
    for turn in (decode, due):
        turn.wait()
    prefill.hold(True)
    assert waited(decode) > 0.05
    assert not waits(due)
    assert not waits(DecodeTurn(path, 0.0))
    prefill.hold(False)
    assert not waits(decode)


def test_decode_goes_on_as_soon_as_prefill_is_done(path: Path) -> None:
    prefill, decode = PrefillTurn(path), DecodeTurn(path, 60.0)
    decode.wait()
    prefill.hold(True)
    threading.Timer(0.05, prefill.hold, (False,)).start()
    assert 0.02 < waited(decode) < 30


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
