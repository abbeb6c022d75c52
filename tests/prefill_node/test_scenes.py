"""What is tested before a prefill node may pack prompts or cut them elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from prefill_node import scenes
from prefill_node.scenes import Limits, Scene

H200 = Limits(chunk=2048, budget=4096, sequences=64, longest=4196, buckets=(16, 512, 2048))
SMALL = Limits(chunk=64, budget=256, sequences=8, longest=228)
TIGHT = Limits(chunk=128, budget=128, sequences=2, longest=300)
KINDS = (scenes.packed, scenes.cut, scenes.cut_and_packed)
SIZES = pytest.mark.parametrize("limits", [H200, SMALL, TIGHT], ids=["H200", "small", "tight"])


def test_lengths_lie_around_the_edges_of_blocks_tiles_and_chunks() -> None:
    assert scenes.probe_lengths(H200) == (1, 15, 16, 17, 127, 128, 129, 2047, 2048, 2049, 4099, 4196)
    assert scenes.probe_lengths(replace(H200, longest=130)) == (1, 15, 16, 17, 127, 128, 129, 130)


@SIZES
@pytest.mark.parametrize("kind", KINDS)
def test_every_step_is_one_that_the_engine_can_run(kind: Callable[[Limits], Iterator[Scene]], limits: Limits) -> None:
    for scene in kind(limits):
        lengths = (*scene.probes, *scene.others)
        done = [0] * len(lengths)
        assert len(lengths) <= limits.sequences, "the GPU runner keeps a place for each until the scene ends"
        for step in scene.steps:
            assert 1 <= len(step) <= limits.sequences
            assert len({piece.prompt for piece in step}) == len(step)
            assert sum(piece.count for piece in step) <= limits.budget
            for piece in step:
                assert piece.count >= 1
                done[piece.prompt] += piece.count
        assert done[: len(scene.probes)] == list(scene.probes), "a probe's pieces are its prompt"
        assert all(got <= length <= limits.longest for got, length in zip(done, lengths, strict=True))


def pieces_of(scene: Scene, prompt: int) -> tuple[int, ...]:
    return tuple(piece.count for step in scene.steps for piece in step if piece.prompt == prompt)


@SIZES
def test_packed_prompts_are_cut_as_the_contract_says(limits: Limits) -> None:
    """Else a model whose bits depend on chunks would be refused the wrong freedom."""
    for scene in scenes.packed(limits):
        assert any(len(step) > 1 for step in scene.steps)
        for number, length in enumerate(scene.probes):
            assert pieces_of(scene, number) == scenes.chunks(length, limits.chunk)


def places(scene: Scene, probe: int) -> set[str]:
    """Where a probe is in its steps, both in the order given and when a runner orders them by their lengths."""
    found = set()
    for step in (step for step in scene.steps if len(step) > 1 and probe in {piece.prompt for piece in step}):
        both = [list(step), sorted(step, key=lambda piece: piece.count)]
        ends = [[piece.prompt for piece in order].index(probe) for order in both]
        found |= {"first" if at == 0 else "last" if at == len(step) - 1 else "middle" for at in ends}
    return found


WIDE = replace(H200, budget=8192, sequences=384, longest=8191)
"""A colocated node's steps, in which three prompts of several chunks have room."""
PAIRS = replace(H200, packs_contexts=False)


@pytest.mark.parametrize("limits", [H200, WIDE, PAIRS], ids=["H200", "wide", "without contexts"])
def test_every_prompt_comes_first_in_the_middle_and_last_beside_others_with_and_without_context(limits: Limits) -> None:
    found = [scene for scene in scenes.packed(limits) if " with context" in scene.name]
    for length in scenes.probe_lengths(limits):
        of_length = [(scene, scene.probes.index(length)) for scene in found if length in scene.probes]
        if not limits.packs_contexts and length > 2 * limits.chunk:
            continue  # Only a first chunk has company, and only if it is one of the last two.
        always = length if limits.packs_contexts else min(length, limits.chunk)  # What is in a step with others.
        wanted = {*scenes.PLACES} - ({"middle"} if 2 * always == limits.budget else set())  # Two are all that fit.
        assert wanted <= set().union(*(places(*each) for each in of_length)), length
    contexts = {scene.name.rpartition(", ")[2] for scene in found}
    assert {f"{number} of them with context" for number in (range(3) if limits.packs_contexts else (0,))} <= contexts


def test_prompts_share_the_long_steps_that_they_fit_into() -> None:
    """One prompt is the first, one in the middle, and one the last: also those whose last chunk has a context."""
    shared = {scene.probes for scene in scenes.packed(WIDE) if " with context" in scene.name}
    assert {(17, 128, 2047), (2049, 4099, 8191)} <= shared
    for scene in scenes.packed(WIDE):
        if len(scene.probes) == 3 and " with context" in scene.name:
            for number, place in enumerate(scenes.PLACES):
                assert place in places(scene, number), scene.name


def sole_contexts(scene: Scene) -> set[str]:
    """Where a probe is in the order of lengths, in steps in which all other prompts begin."""
    found, begun = set[str](), set[int]()
    for step in scene.steps:
        ordered = [piece.prompt for piece in sorted(step, key=lambda piece: piece.count)]
        with_context = begun & {*ordered}
        if len(step) > 1 and len(with_context) == 1 and min(with_context) < len(scene.probes):
            at = ordered.index(min(with_context))
            found.add("first" if at == 0 else "last" if at == len(step) - 1 else "middle")
        begun |= {*ordered}
    return found


@pytest.mark.parametrize("limits", [H200, WIDE], ids=["H200", "wide"])
def test_a_prompt_with_context_comes_at_every_place_beside_whole_prompts_alone(limits: Limits) -> None:
    assert set().union(*map(sole_contexts, scenes.packed(limits))) == {*scenes.PLACES}


def test_a_prompt_with_context_is_alone_where_contexts_must_not_be_packed() -> None:
    for packs in (True, False):
        beside: set[bool] = set()
        for scene in scenes.packed(replace(H200, packs_contexts=packs)):
            done = Counter[int]()
            for step in scene.steps:
                beside.update(done[piece.prompt] > 0 for piece in step if len(step) > 1)
                done.update({piece.prompt: piece.count for piece in step})
        assert beside == ({True, False} if packs else {False})


def test_the_first_chunk_of_a_longer_prompt_has_company_also_where_contexts_have_none() -> None:
    alone = replace(H200, packs_contexts=False)
    assert any(scene.probes == (2049,) and len(scene.steps[0]) > 1 for scene in scenes.packed(alone))


def test_both_sides_of_every_graph_and_longer_steps_are_tested() -> None:
    totals = {sum(piece.count for piece in step) for scene in scenes.packed(H200) for step in scene.steps}
    assert {512, 513, 2048, 2049, 4095, 4096} <= totals


def test_the_last_chunk_is_one_token_or_few_after_much_context_in_company() -> None:
    """There FlashAttention's tiles follow the query length, for head size 64."""
    found = {
        piece.count
        for scene in scenes.packed(H200)
        if " with context" in scene.name
        for step in scene.steps
        for piece in step
        if scene.probes[piece.prompt : piece.prompt + 1] in ((2049,), (4099,)) and len(step) > 1
    }
    assert {1, 3} <= found


def test_prompts_are_cut_at_blocks_at_odd_places_and_into_single_tokens() -> None:
    cuts = {(scene.probes[0], scene.name): pieces_of(scene, 0) for scene in scenes.cut(H200)}
    assert cuts[129, "cut into pieces of 1"] == (125, 1, 1, 1, 1)
    assert cuts[4099, "cut into pieces of 16"] == (2048, 1795, *[16] * 16)
    assert cuts[4099, "cut into pieces of 333"] == (*[333] * 12, 103)
    assert cuts[4099, "cut into pieces of 1000"] == (*[1000] * 4, 99)
    assert cuts[4099, "cut into pieces of 2032"] == (2032, 2032, 35)
    assert cuts[4099, "cut into pieces of 4096"] == (4096, 3)
    assert cuts[4196, "cut into pieces of 4096"] == (4096, 100)
    assert {length for length, _ in cuts} == {17, 129, 2049, 4099, 4196}
    assert any(len(scene.steps) == 1 for scene in scenes.cut(replace(H200, longest=4096))), "a whole step of one prompt"
    assert all(pieces != scenes.chunks(length, 2048) for (length, _), pieces in cuts.items())


def test_cut_prompts_share_steps_and_end_together() -> None:
    found = list(scenes.cut_and_packed(H200))
    assert len(found) == 3
    for scene in found:
        assert {piece.prompt for piece in scene.steps[-1]} >= {0, 1} or len(scene.steps[-1]) == 1


def test_the_first_scenes_are_those_of_a_cpu() -> None:
    """Its test ends soon, so what differs there must be tried at once."""
    limits = Limits(chunk=2048, budget=2048, sequences=8, longest=1600, scenes=2)
    first, second = scenes.planned(scenes.packed, limits)
    assert {1, 15, 16, 17, 127, 128, 129} <= set(first.probes)
    assert (second.probes, sum(piece.count for piece in second.steps[0])) == ((1600,), 2048)
    assert next(scenes.cut(limits)).name == "cut into pieces of 1"
    assert scenes.blocks_wanted(limits, 16) < 500


@pytest.mark.parametrize("blocks", [20, 100, 400, 1200, 100_000])
def test_the_test_fits_into_the_blocks_that_there_are(blocks: int) -> None:
    limits = scenes.within(replace(H200, sequences=128), blocks, 16)
    assert scenes.blocks_wanted(limits, 16) <= blocks
    assert (limits.longest == 4196) == (blocks == 100_000)
