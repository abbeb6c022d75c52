"""The forms for issues have the shape that hosting platforms take, and ask for what commands really print."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from corun.cli import COMMANDS

FOLDER = Path(__file__).parent.parent / ".github" / "ISSUE_TEMPLATE"
FORMS = sorted(path for path in FOLDER.glob("*.yml") if path.name != "config.yml")
KINDS = {"markdown", "input", "textarea", "dropdown", "checkboxes"}


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_a_form_can_be_filled_in(path: Path) -> None:
    form: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert set(form) == {"name", "description", "labels", "body"}
    assert len(form["description"]) <= 200
    asked = [part for part in form["body"] if part["type"] != "markdown"]
    assert {part["type"] for part in form["body"]} <= KINDS
    assert [part for part in form["body"] if part["type"] == "markdown" and set(part) != {"type", "attributes"}] == []
    ids = [part["id"] for part in asked]
    labels = [part["attributes"]["label"] for part in asked]
    assert (len(set(ids)), len(set(labels))) == (len(asked), len(asked))
    assert all(re.fullmatch(r"[a-z_-]+", one) for one in ids)
    assert any(part.get("validations", {}).get("required") for part in asked)
    for part in asked:
        if part["type"] in ("dropdown", "checkboxes"):
            options = [one["label"] if isinstance(one, dict) else one for one in part["attributes"]["options"]]
            assert len(set(options)) == len(options) > 1
            assert all(isinstance(one, str) for one in options), "a bare yes or no is no text in YAML"


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_a_form_names_commands_that_there_are(path: Path) -> None:
    named = re.findall(r"`corun ([a-z]+)", path.read_text(encoding="utf-8"))
    assert set(named) <= set(COMMANDS)


def test_whoever_reports_other_bits_is_asked_for_the_evidence() -> None:
    (path,) = (path for path in FORMS if "bits" in path.name)
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    required = {part["id"] for part in form["body"] if part.get("validations", {}).get("required")}
    assert {"records", "diff", "replay", "fingerprint", "status"} <= required
