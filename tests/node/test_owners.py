"""Which blocks get which owner, and when a prompt is signed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from corun.node.kv.owners import Owned, Prefills


def request(name: str = "r", prompt: int = 40, **params: Any) -> Any:
    given = {"do_remote_decode": True, "corun_owner": 100, "corun_check": True, **params}
    return SimpleNamespace(request_id=name, num_prompt_tokens=prompt, num_computed_tokens=0, kv_transfer_params=given)


def test_blocks_are_counted_over_the_chunks_of_a_prompt() -> None:
    prefills = Prefills()
    prefills.begin(request())
    assert prefills.give("r", [7, 3], anew=False) == Owned(100, 0, (7, 3))
    assert prefills.give("r", [], anew=False) is None
    assert prefills.give("r", [9], anew=False) == Owned(100, 2, (9,))


def test_a_request_that_lost_its_blocks_begins_again() -> None:
    prefills = Prefills()
    prefills.begin(request())
    prefills.give("r", [7, 3], anew=False)
    assert prefills.give("r", [1, 2, 3], anew=True) == Owned(100, 0, (1, 2, 3))


def test_each_request_has_its_own_account() -> None:
    prefills = Prefills()
    for name, owner in (("r", 100), ("s", 200)):
        prefills.begin(request(name, corun_owner=owner))
    prefills.give("r", [1], anew=False)
    assert prefills.give("s", [2], anew=False) == Owned(200, 0, (2,))
    prefills.end("r")
    prefills.end("never began")
    assert prefills.give("r", [3], anew=False) is None
    assert len(prefills) == 1


@pytest.mark.parametrize("params", [{"do_remote_decode": False}, None])
def test_what_nobody_may_read_gets_no_owner(params: dict[str, Any] | None) -> None:
    prefills = Prefills()
    reader = request(**(params or {}))
    if params is None:
        reader.kv_transfer_params = None
    prefills.begin(reader)
    assert len(prefills) == 0
    assert prefills.give("r", [1], anew=False) is None


def test_a_prompt_is_signed_once_and_whole_by_the_step_that_completes_it() -> None:
    prefills = Prefills()
    running = request(prompt=40)
    prefills.begin(running)
    prefills.give("r", [7, 3], anew=False)
    assert prefills.completed("r", 32) == ()
    running.num_computed_tokens = 32
    prefills.give("r", [9], anew=False)
    assert prefills.completed("r", 7) == ()
    assert prefills.completed("r", 8) == (7, 3, 9)
    running.num_computed_tokens = 40
    assert prefills.completed("r", 1) == ()


def test_a_prompt_that_is_not_chosen_is_not_signed() -> None:
    prefills = Prefills()
    prefills.begin(request(prompt=16, corun_check=False))
    prefills.give("r", [7], anew=False)
    assert prefills.completed("r", 16) == ()
    assert prefills.completed("unknown", 16) == ()
