"""docs/settings.md agrees with the config classes and with what the processes take."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from corun.config import docs
from corun.config.flags import parse
from corun.contract import DecodeContract, ModelContract, PrefillContract
from corun.node.vllm import pin

ROOT = Path(__file__).parents[2]
SECTIONS = {
    "router": ("Every process", "Router"),
    "prefill": ("Every process", "Every node", "Prefill and colocated nodes"),
    "decode": ("Every process", "Every node", "Decode and colocated nodes"),
    "colocated": (
        "Every process",
        "Every node",
        "Prefill and colocated nodes",
        "Decode and colocated nodes",
        "Colocated node",
    ),
}


def rows(section: str) -> list[list[str]]:
    """Return the cells of a section's table, without its head."""
    text = docs.markdown().split(f"## {section}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").replace("\\|", "/").split(" | ")] for line in lines[2:]]


def test_the_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert page == docs.markdown(), "docs/settings.md is not what the config classes give; run: make docs"


@pytest.mark.parametrize("process", SECTIONS)
def test_flags_are_those_of_the_command_line(process: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(docs.PROCESSES[process], ["--help"])
    words = set(capsys.readouterr().out.replace(",", " ").split())
    flags = [flag.strip(" `") for section in SECTIONS[process] for row in rows(section) for flag in row[0].split(",")]
    assert [flag for flag in flags if flag not in words and flag != "none"] == []


def test_what_is_marked_is_what_contracts_have() -> None:
    """Contracts have `model` as digests of its files, and `decode_split` as what is in effect: `split_policy`."""
    contract = {known.name for part in (ModelContract, PrefillContract, DecodeContract) for known in fields(part)}
    known = {known.name: known for cls in docs.PROCESSES.values() for known in fields(cls)}
    marked = {name for name, each in known.items() if each.metadata.get("contract")}
    assert marked == (contract & known.keys()) | {"model", "decode_split"}


@dataclass
class Silent:
    one: int = 1
    two: int = 2
    """Only this."""


def test_a_field_without_a_docstring_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"Silent\.one has no docstring"):
        docs.effects(Silent)


def test_the_environment_that_the_processes_read_is_listed() -> None:
    listed = [name.strip("` ") for row in rows("Environment") for name in row[0].split(",")]
    read: set[str] = set()
    for package in ("corun", "router", "prefill_node", "decode_node", "colocated_node"):
        for path in (ROOT / package).rglob("*.py"):
            if "v1" not in path.parts:
                read |= variables_read(path.read_text(encoding="utf-8"))
    assert {"CORUN_SEED_KEY", "CORUN_TOKEN_FILE", "UCX_NET_DEVICES"} <= read
    assert {name for name in read if not any(fnmatchcase(name, known) for known in listed)} == set()
    (pinned,) = (row[0] for row in rows("Environment") if "VLLM_*" in row[0])
    assert {name.strip("` *") for name in pinned.split(",")} <= set(pin.WATCHED)


def test_the_reader_of_variables_reads_all_of_them() -> None:
    source = """
A_VARIABLE = "A"
os.environ.get(A_VARIABLE, "")
os.environ["B"] = "1"
if "C" not in os.environ: pass
os.environ.setdefault("D", "1")
os.getenv("E")
os.environ.get(name)
"""
    assert variables_read(source) == {"A", "B", "C", "D", "E"}


CONSTANTS = {"SEED_KEY_VARIABLE": "CORUN_SEED_KEY"}
"""Constants that other modules than the one that defines them use."""


def variables_read(source: str) -> set[str]:
    """Return the names of the environment variables that a module reads or sets, if they are literals or constants."""
    constants = CONSTANTS | dict(re.findall(r'^(\w+) = "(\w+)"$', source, re.MULTILINE))
    words = re.findall(r'os\.(?:getenv\(|environ(?:\.(?:get|setdefault|pop)\(|\[))("?\w+"?)', source)
    words += re.findall(r'("?\w+"?) (?:not )?in os\.environ', source)
    names = (word.strip('"') if word.startswith('"') else constants.get(word, "") for word in words)
    return {name for name in names if name}
