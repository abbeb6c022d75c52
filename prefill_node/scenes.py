"""Which steps show that a prefill node may pack prompts and cut them anywhere: the plan, without any engine.

Owns: the lengths of the prompts under test, the company that they get, and where they are cut. Lengths are in tokens.
Must not know: how steps are run and compared (prefill_node/certify.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

BLOCK_EDGES = (1, 15, 16, 17)
TILE_EDGES = (127, 128, 129)
"""The lengths around attention's tiles of 128 keys. The shortest prompts come first in every list: if rows matter at
all, as on a CPU, the first comparison finds it."""
CUTS = (1, 16, 333, 1000)
ACCOMPANIED = 2
"""The most steps of a prompt, its last ones, that hold others, too."""
PLACES = ("first", "middle", "last")
MAX_PIECES = 16
"""The most pieces of one size that a prompt is cut into, at its end; what comes before them is cut as the contract
says."""
MAX_SINGLE = 4
"""The most pieces of one token: enough to cross an edge. A step of one token runs without a graph, and takes several
times as long."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The sizes of an engine's steps."""

    chunk: int
    """The most tokens of a prompt in one step, by the contract."""
    budget: int
    """The most tokens of a step."""
    sequences: int
    """The most sequences of a step."""
    longest: int
    """The longest prompt that the test has room for."""
    packs_contexts: bool = True
    """Whether a prompt may share a step after a part of it was computed (corun/node/vllm/structure.py)."""
    buckets: tuple[int, ...] = ()
    """The numbers of tokens that have a graph, ascending."""
    scenes: int = 1_000_000
    """The most scenes of each kind."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The next tokens of one prompt in a step."""

    prompt: int
    """The place of the prompt's length in `Scene.probes`, or after all of these in `Scene.others`."""
    count: int


@dataclass(frozen=True, slots=True)
class Scene:
    """Some steps. Probes are compared with the same prompts in the contract's own form, the others keep them company.

    Each probe's pieces add up to its length. Those of the others may end before: company needs no end.
    """

    name: str
    probes: tuple[int, ...]
    others: tuple[int, ...]
    steps: tuple[tuple[Piece, ...], ...]


def probe_lengths(limits: Limits) -> tuple[int, ...]:
    """Return the lengths of the prompts under test: around the edges of blocks, tiles and chunks, ascending."""
    chunk = limits.chunk
    lengths = {*BLOCK_EDGES, *TILE_EDGES, chunk - 1, chunk, chunk + 1, 2 * chunk + 3, limits.longest}
    return tuple(sorted(length for length in lengths if 1 <= length <= limits.longest))


def chunks(length: int, chunk: int) -> tuple[int, ...]:
    """Return a prompt's chunks as the contract cuts them."""
    return tuple(min(chunk, length - start) for start in range(0, length, chunk))


def packed(limits: Limits) -> Iterator[Scene]:
    """Yield the scenes with several prompts in a step; every prompt is cut as the contract says.

    First come all short prompts together, and the longest one beside as many tokens as fit: mostly one of the two shows
    at once if other rows matter. Then come steps at both sides of the edges of graphs, and every prompt first, in the
    middle and last in its steps, beside whole prompts and beside prompts with context in turn. Long steps take most of
    the time, so prompts share them: one of them is the first, one in the middle, and one the last.
    """
    lengths = probe_lengths(limits)
    yield from _together(lengths, limits)
    yield from (scene for scene in [_beside({"last": limits.longest}, limits.budget, 0, limits)] if scene.others)
    yield from _edges(lengths, limits)
    # Longer prompts that share their steps are company with context for each other. Here all others are whole.
    if limits.packs_contexts and limits.longest > limits.chunk:
        alone = _beside({"middle": limits.chunk + 1}, limits.chunk // 4, 0, limits)
        yield from (scene for scene in [alone] if scene.others)
    totals = itertools.cycle((limits.budget, limits.chunk // 4, limits.budget - 1, limits.chunk // 4 - 1, limits.chunk))
    contexts = itertools.cycle((0, 1, 2))
    for placed in _placed(lengths, limits):
        scene = _beside(placed, next(totals), next(contexts), limits)
        if scene.others:
            yield scene


def _placed(lengths: Sequence[int], limits: Limits) -> Iterator[dict[str, int]]:
    """Yield which prompts share a scene, by place: each one comes once at every place.

    A prompt of one chunk shares no scene with a longer one, whose last chunk may be shorter than itself.
    """
    of_one_chunk = [length for length in lengths if length <= limits.chunk]
    longer = [length for length in lengths if length > limits.chunk]
    longer.sort(key=lambda length: chunks(length, limits.chunk)[-1])
    for some, apart in ((of_one_chunk, 2), (longer, 1)):
        around = [0] * (2 * apart)
        padded = [*around, *some, *around]
        for number in range(len(some) + 2 * apart):
            of_each = zip(PLACES, padded[number::apart][:3], strict=True)
            placed = {place: length for place, length in of_each if length}
            behind = placed.get("last") or placed.get("middle", 0)  # Something as long comes behind the middle.
            least = (placed.get("first", 0), placed.get("middle", 0), behind)
            tokens = sum(min(length, limits.chunk) for length in least)
            has_room = tokens < limits.budget and len(placed) < limits.sequences
            if placed and has_room and (limits.packs_contexts or some is of_one_chunk):
                yield placed
            else:
                yield from ({place: length} for place, length in placed.items())


def _together(lengths: Sequence[int], limits: Limits) -> Iterator[Scene]:
    short = tuple(_fitting(lengths, min(limits.chunk, limits.budget), limits))
    if len(short) > 1:
        steps = (tuple(Piece(number, length) for number, length in enumerate(short)),)
        yield Scene(f"{len(short)} prompts in a step of {sum(short)}", short, (), steps)


def _edges(lengths: Sequence[int], limits: Limits) -> Iterator[Scene]:
    """Yield a step with each number of tokens at both sides of the buckets' edges. Above a chunk it is only the
    shortest step of each graph, which has the most padding. Prompts in company fill whole steps anyway."""
    edges = {total for edge in limits.buckets for total in (edge, edge + 1) if total <= limits.chunk or total > edge}
    for total in sorted(edge for edge in {*edges, limits.chunk + 1} if edge <= limits.budget):
        short = tuple(_fitting(lengths, total - 1, limits))
        others = _parts(total - sum(short), limits.longest, limits.sequences - len(short))
        if short and others:
            pieces = tuple(Piece(number, length) for number, length in enumerate((*short, *others)))
            name = f"{len(short)} prompts beside {len(others)} others in a step of {sum(short) + sum(others)}"
            yield Scene(name, short, others, (pieces,))


def _fitting(lengths: Sequence[int], room: int, limits: Limits) -> Iterator[int]:
    """Yield the shortest lengths that fit into one step together with one more sequence."""
    for length in lengths[: max(limits.sequences - 1, 1)]:
        room -= length
        if room < 0 or length > limits.chunk:
            return
        yield length


def _beside(placed: Mapping[str, int], total: int, contexts: int, limits: Limits) -> Scene:
    """Return a scene in which prompts have company in their last steps, at most `ACCOMPANIED`; they end together.

    A runner may order a step by the number of tokens (vllm/v1/worker/gpu/model_runner.py: `sort_batch_req_ids`), so a
    prompt comes first beside longer ones and last beside shorter ones, here and there.
    placed: the prompts' lengths by place, in the order of `PLACES`.
    contexts: how many of the others have computed a part of themselves in an earlier step.
    """
    others: list[int] = []
    heads: list[Piece] = []
    steps: list[tuple[Piece, ...]] = []
    cuts = [chunks(length, limits.chunk) for length in placed.values()]
    longest = max(map(len, cuts))
    for left in range(longest, 0, -1):
        probes = enumerate(zip(placed, cuts, strict=True))
        own = {place: Piece(at, cut[-left]) for at, (place, cut) in probes if left <= len(cut)}
        counts = {place: piece.count for place, piece in own.items()}
        count = sum(counts.values())
        accompanied = left <= ACCOMPANIED and (limits.packs_contexts or left == longest)
        room = min(max(total, 2 * count), limits.budget) - count if accompanied else 0
        company: list[list[Piece]] = []
        for sizes in _company(counts, room, limits.sequences - len(placed) - len(others), limits):
            company.append([])
            for size in sizes:
                begins = limits.packs_contexts and len(others) < contexts
                head = min(max(limits.chunk // 4, 1), limits.longest - size) if begins else 0
                others.append(head + size)
                number = len(placed) + len(others) - 1
                company[-1].append(Piece(number, size))
                heads += [Piece(number, head)] if head else []
        before, after = company
        first, middle, last = ([own[place]] if place in own else [] for place in PLACES)
        steps.append((*first, *before, *middle, *after, *last))
    sums = ", ".join(str(sum(piece.count for piece in step)) for step in steps)
    places = ", ".join(f"{length} {place}" for place, length in placed.items())
    name = f"{places} of {len(others) + len(placed)} prompts in steps of {sums}, {len(heads)} of them with context"
    return Scene(name, tuple(placed.values()), tuple(others), (*([tuple(heads)] if heads else []), *steps))


def _company(counts: Mapping[str, int], room: int, seats: int, limits: Limits) -> tuple[tuple[int, ...], ...]:
    """Return the lengths of the others in a step with `room` for them: those that come before the middle, and after it.

    counts: the tokens of the probes in the step, by place. seats: the most others; they keep their places in the engine
    to the end of the scene.
    """
    first, middle, last = (counts.get(place, 0) for place in PLACES)

    def between(room: int, seats: int, shortest: int, longest: int) -> tuple[int, ...]:
        return _parts(room, min(longest, limits.longest), min(seats, room // max(shortest, 1)))

    if not middle and not first:
        return between(room, seats, 1, last), ()
    behind = middle if room > middle and not last else 0  # Else nothing that is as long as the middle comes behind it.
    before = between(min(room // 2, room - behind), seats // 2, first, middle) if middle else ()
    after = between(room - sum(before), seats - len(before), middle or first, last or limits.longest)
    return before, after


def _parts(total: int, longest: int, most: int) -> tuple[int, ...]:
    """Cut `total` into at most `most` nearly equal parts, none above `longest`; what does not fit is left out."""
    if total <= 0 or most <= 0:
        return ()
    number = min(max(-(-total // longest), min(most, 3)), most, total)
    return tuple(min(longest, total // number + (index < total % number)) for index in range(number))


def cut(limits: Limits) -> Iterator[Scene]:
    """Yield the scenes in which prompts run alone, but are cut elsewhere than the contract says."""
    lengths = probe_lengths(limits)
    wanted = (TILE_EDGES[-1], BLOCK_EDGES[-1], limits.chunk + 1, 2 * limits.chunk + 3)
    for length in dict.fromkeys(_closest(lengths, close) for close in wanted):
        for size in sorted({*CUTS, limits.chunk - 16, limits.budget}):
            pieces = _pieces(length, size, limits)
            if pieces != chunks(length, limits.chunk):
                yield _alone(length, size, pieces)
    # A prompt alone gets all of a step.
    if (pieces := _pieces(limits.longest, limits.budget, limits)) != chunks(limits.longest, limits.chunk):
        yield _alone(limits.longest, limits.budget, pieces)


def _alone(length: int, size: int, pieces: Iterable[int]) -> Scene:
    return Scene(f"cut into pieces of {size}", (length,), (), tuple((Piece(0, count),) for count in pieces))


def _closest(lengths: Sequence[int], wanted: int) -> int:
    return min(lengths, key=lambda length: abs(length - wanted))


def _pieces(length: int, size: int, limits: Limits) -> tuple[int, ...]:
    """Cut the end of a prompt into pieces of `size`, and what is before them as the contract says."""
    if not 1 <= size <= limits.budget:
        return chunks(length, limits.chunk)
    tail = min(MAX_PIECES if size > 1 else MAX_SINGLE, -(-length // size))
    head = max(0, length - tail * size)
    return (*chunks(head, limits.chunk), *chunks(length - head, size))


def cut_and_packed(limits: Limits) -> Iterator[Scene]:
    """Yield the scenes in which several prompts that are cut elsewhere share their steps."""
    lengths = [length for length in probe_lengths(limits) if length > BLOCK_EDGES[-1]][-limits.sequences :]
    for size in CUTS[1:]:
        count = min(size, limits.budget // max(len(lengths), 1))
        if count < 1 or len(lengths) < 2:
            return
        cuts = [_pieces(length, count, limits) for length in lengths]
        # All end together, so that the last steps hold prompts with context only.
        steps: list[tuple[Piece, ...]] = []
        for back in range(max(map(len, cuts)), 0, -1):
            step = [Piece(number, pieces[-back]) for number, pieces in enumerate(cuts) if len(pieces) >= back]
            if sum(piece.count for piece in step) > limits.budget:
                steps += [(piece,) for piece in step]
            else:
                steps.append(tuple(step))
        yield Scene(f"{len(lengths)} prompts in pieces of {count} in the same steps", tuple(lengths), (), tuple(steps))


def planned(kind: Callable[[Limits], Iterator[Scene]], limits: Limits) -> Iterator[Scene]:
    """Return the scenes of one kind, at most `Limits.scenes`."""
    return itertools.islice(kind(limits), limits.scenes)


def blocks_wanted(limits: Limits, block_size: int) -> int:
    """Return how many KV blocks the whole test needs: all references, and the largest scene beside them."""

    def blocks(lengths: Iterable[int]) -> int:
        return sum(-(-length // block_size) for length in lengths)

    all_scenes = itertools.chain(*(planned(kind, limits) for kind in (packed, cut, cut_and_packed)))
    sizes = [blocks([*scene.probes, *scene.others]) for scene in all_scenes]
    return blocks(probe_lengths(limits)) + max([blocks([limits.longest]), *sizes])


def within(limits: Limits, blocks: int, block_size: int) -> Limits:
    """Return the limits with a longest prompt so short, and so few sequences, that the whole test fits into `blocks` KV
    blocks."""
    while blocks_wanted(limits, block_size) > blocks and limits.longest + limits.sequences > 2:
        if limits.longest > 1:
            limits = replace(limits, longest=limits.longest // 2)
        else:
            limits = replace(limits, sequences=limits.sequences // 2)
    return limits
