"""What a starting process says of itself, and how that is read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from corun.observe.stages import Reader


def test_a_stage_is_read_from_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = "from corun.observe import stages; print('noise', flush=True); stages.enter('one'); stages.enter('two')"
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
    # A process that is started again has no stage yet.
    end = log.stat().st_size
    assert reader.stage(end) == ""
    with log.open("ab") as file:
        file.write(b"stage: again\n")
    assert reader.stage(end) == "again"
    # The log may lie in a directory that something clears now and then; that must not end who asks, nor the cluster.
    log.unlink()
    assert reader.stage(end) == "again"


def test_a_line_longer_than_is_looked_at_hides_nothing_behind_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x" * 2**21 + b"\nstage: one\n")
    reader = Reader(log)
    assert [reader.stage(0) for _ in range(3)][-1] == "one"
