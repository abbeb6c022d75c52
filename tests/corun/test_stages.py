"""What a starting process says of itself, and how that is read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from corun.stages import Reader


def test_a_stage_is_read_from_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = "from corun import stages; print('noise', flush=True); stages.enter('one'); stages.enter('two')"
    with log.open("wb") as file:
        subprocess.run([sys.executable, "-c", code], stdout=file, stderr=file, check=True, timeout=60)
    assert Reader(log).stage(0) == "two"


def test_only_what_is_new_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"stage: one\nnoise stage: not one\nstage: tw")
    reader = Reader(log)
    assert reader.stage(0) == "one"
    with log.open("ab") as file:
        file.write(b"o\n\xff\n")
    assert (reader.stage(0), reader.stage(0)) == ("two", "two")


def test_a_process_that_is_started_again_has_no_stage_yet(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"stage: one\n")
    reader = Reader(log)
    assert reader.stage(0) == "one"
    assert reader.stage(log.stat().st_size) == ""
    with log.open("ab") as file:
        file.write(b"stage: again\n")
    assert reader.stage(len("stage: one\n")) == "again"
