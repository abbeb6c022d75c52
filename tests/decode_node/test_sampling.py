"""R(seed, position), and the step from logits to a token, which reads nothing of other rows."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from corun.node.vllm.logprobs import PART, PIECE_ROWS, alternatives, log_probabilities, top_tokens
from decode_node import sampling
from decode_node.sampling import IDLE, Draw, variate

STEPS = 2**53
"""The number of values that R can take."""
SAMPLED = Draw(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=42, position=0)
INF, NAN = math.inf, math.nan


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread, because waking a second one takes far longer than these tiny tensors do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def swept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make R position / 2^53, so that a test can ask for any variate."""
    monkeypatch.setattr(sampling, "variate", lambda seed, position: position / STEPS)


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Return the tokens of rows, all of which can be drawn from."""
    tokens, sound = sampling.sample(logits, draws)
    assert sound.all()
    return tokens


def logits_of(probs: Sequence[float]) -> list[float]:
    return [math.log(p) if p > 0 else -INF for p in probs]


def sweep(logits: Sequence[float], draw: Draw, points: int = 1000) -> list[int]:
    """Return how often each token is drawn when R goes once through [0, 1)."""
    draws = [replace(draw, position=i * STEPS // points) for i in range(points)]
    tokens = sample(torch.tensor([logits] * points), draws)
    return torch.bincount(tokens, minlength=len(logits)).tolist()


def test_variates_are_pinned() -> None:
    """Any change here changes every sampled token, so it needs a new SAMPLER_VERSION."""
    vectors = {
        (0, 0): "0x1.c2697bf7ee569p-1",
        (0, 1): "0x1.021ba96185359p-1",
        (1, 0): "0x1.fb4b7bad2965fp-1",
        (42, 0): "0x1.8a9e3cb55cf60p-6",
        (42, 1): "0x1.c6850a01e9822p-2",
        (42, 4095): "0x1.124bfcec0d924p-2",
        (2**63 - 1, 2**32 - 1): "0x1.c22d6a8dcc202p-2",
    }
    assert {key: variate(*key).hex() for key in vectors} == vectors
    assert sampling.SAMPLER_VERSION == "corun-inverse-cdf-2"


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**32))
def test_variates_are_in_range_on_the_grid_of_53_bits(seed: int, position: int) -> None:
    value = variate(seed, position)
    assert 0 <= value < 1
    assert (value * STEPS).is_integer()


def test_variates_are_uniform_along_both_axes() -> None:
    """Each row has 64 bins of 100 values. Chi-square has 63 degrees of freedom; 120 is beyond 1 in 10^4. The values are
    always the same."""
    along = {
        "positions": [variate(7, i) for i in range(6400)],
        "seeds": [variate(i, 7) for i in range(6400)],
        "diagonal": [variate(i, 6400 - i) for i in range(6400)],
    }
    for name, values in along.items():
        counts = [0] * 64
        for value in values:
            counts[int(value * 64)] += 1
        assert sum((count - 100) ** 2 / 100 for count in counts) < 120, name
    neighbours = [(a - 0.5) * (b - 0.5) * 12 for a, b in itertools.pairwise(along["positions"])]
    assert abs(sum(neighbours) / len(neighbours)) < 4 / math.sqrt(len(neighbours))


def test_greedy_takes_the_first_of_the_likeliest() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, -INF, 5.0, 5.0], [-INF, -INF, -INF, -2.0]])
    greedy = replace(SAMPLED, temperature=0.0, top_k=3, top_p=0.1, min_p=0.9)
    for draws in ([IDLE] * 3, [greedy] * 3, [replace(greedy, seed=9, position=9), IDLE, greedy]):
        assert sample(logits, draws).tolist() == [1, 0, 3]


@pytest.mark.usefixtures("swept")
@pytest.mark.parametrize("temperature", [0.25, 0.5, 1.0, 2.0])
def test_tokens_divide_the_unit_interval_in_proportion(temperature: float) -> None:
    probs = [0.125, 0.5, 0.0, 0.25, 0.125]
    weights = [p ** (1 / temperature) for p in probs]
    expected = [1000 * weight / sum(weights) for weight in weights]
    assert sweep(logits_of(probs), replace(SAMPLED, temperature=temperature)) == pytest.approx(expected, abs=1)


TIE = [1.0, 1.0, 2.0, 1.0]
"""Tokens 0, 1 and 3 tie; 2 is the likeliest."""
EQUAL = [0.0] * 4
"""Four tokens whose probabilities are exactly 1/4."""
RISING, FALLING = [0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]


@pytest.mark.usefixtures("swept")
@pytest.mark.parametrize(
    ("logits", "filters", "kept"),
    [
        # top_k keeps exactly k, and the first of a tie.
        (TIE, {"top_k": 0}, {0, 1, 2, 3}),
        (TIE, {"top_k": 1}, {2}),
        (TIE, {"top_k": 2}, {0, 2}),
        (TIE, {"top_k": 3}, {0, 1, 2}),
        (TIE, {"top_k": 4}, {0, 1, 2, 3}),
        (TIE, {"top_k": 99}, {0, 1, 2, 3}),
        # top_p stops at the token that reaches it, and goes by probability, not by id.
        (EQUAL, {"top_p": 1e-9}, {0}),
        (EQUAL, {"top_p": 0.25}, {0}),
        (EQUAL, {"top_p": 0.2500001}, {0, 1}),
        (EQUAL, {"top_p": 0.75}, {0, 1, 2}),
        (EQUAL, {"top_p": 0.99}, {0, 1, 2, 3}),
        (EQUAL, {"top_p": 1.0}, {0, 1, 2, 3}),
        (logits_of(RISING), {"top_p": 0.3}, {3}),
        (logits_of(RISING), {"top_p": 0.69}, {2, 3}),
        (logits_of(RISING), {"top_p": 0.71}, {1, 2, 3}),
        # min_p is relative to the likeliest; 1.0 keeps every token as likely as that.
        (logits_of([0.1, 0.3, 0.4, 0.4]), {"min_p": 0.24}, {0, 1, 2, 3}),
        (logits_of([0.1, 0.3, 0.4, 0.4]), {"min_p": 0.26}, {1, 2, 3}),
        (logits_of([0.1, 0.3, 0.4, 0.4]), {"min_p": 1.0}, {2, 3}),
        # Filters work on what the one before kept (min_p, top_k, top_p): top_k = 2 leaves 4/7 and 3/7.
        (logits_of(FALLING), {"top_p": 0.5}, {0, 1}),
        (logits_of(FALLING), {"top_p": 0.5, "top_k": 2}, {0}),
        (logits_of(FALLING), {"top_p": 0.6, "top_k": 2}, {0, 1}),
        (logits_of(FALLING), {"top_p": 0.6, "min_p": 0.6}, {0, 1}),
        (logits_of(FALLING), {"top_p": 0.9, "top_k": 3, "min_p": 0.7}, {0, 1}),
        (logits_of(FALLING), {"temperature": 0.1, "min_p": 0.2}, {0}),
    ],
)
def test_filters_keep_these_tokens(logits: list[float], filters: dict[str, Any], kept: set[int]) -> None:
    counts = sweep(logits, replace(SAMPLED, **filters))
    assert {token for token, count in enumerate(counts) if count} == kept


@pytest.mark.usefixtures("swept")
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.999}, {"min_p": 1e-6}])
@pytest.mark.parametrize("position", [0, 1, STEPS // 2, STEPS - 2, STEPS - 1])
def test_a_token_of_probability_zero_is_never_drawn(position: int, filters: dict[str, float]) -> None:
    """Such tokens are masked or too unlikely for fp32, at both ends of the vocabulary and in between."""
    rows = [[-INF, -INF, 0.0, -INF, 1.0, -INF], [-200.0, 0.0, -INF, 0.0, -200.0, -300.0], [-INF] * 5 + [-99.0]]
    draws = [replace(SAMPLED, position=position, **filters)] * 3
    first, second, third = sample(torch.tensor(rows), draws).tolist()
    assert first in {2, 4}
    assert second in {1, 3}
    assert third == 5
    if position >= STEPS - 2:
        assert (first, second) == (4, 3)
    if position == 0:
        assert (first, second) == (2, 1)


@pytest.mark.usefixtures("swept")
def test_the_ends_of_a_large_vocabulary() -> None:
    """The sum of 150,000 rounded probabilities is not 1; R near 0 and 1 still finds the first and the last token."""
    logits = torch.randn(2, 150_000, generator=torch.Generator().manual_seed(0))
    draws = [replace(SAMPLED, position=0), replace(SAMPLED, position=STEPS - 1)]
    assert sample(logits, draws).tolist() == [0, 149_999]


SOURCES = st.integers(0, 2**32).map(random.Random)
TEMPERATURES, TOP_KS, TOP_PS, MIN_PS = (
    [0.0, 0.01, 0.6, 1.0, 3.0],
    [0, 0, 1, 2, 5, 50],
    [1.0, 1.0, 0.999, 0.5, 1e-6],
    [0, 0, 0.1, 1],
)


def random_draw(source: random.Random) -> Draw:
    return Draw(
        temperature=source.choice(TEMPERATURES),
        top_k=source.choice(TOP_KS),
        top_p=source.choice(TOP_PS),
        min_p=source.choice(MIN_PS),
        seed=source.getrandbits(63),
        position=source.randrange(10_000),
    )


def random_logits(source: random.Random, vocab: int) -> list[float]:
    """Return multiples of 1/8, so that ties are exact. Some tokens are masked, never all."""
    logits = [source.choice([source.randrange(-240, 240) / 8, source.randrange(-8, 8) / 8, -INF]) for _ in range(vocab)]
    logits[source.randrange(vocab)] = 1.0
    return logits


@settings(max_examples=100)
@given(SOURCES, st.integers(2, 200), st.integers(1, 9))
def test_a_row_reads_nothing_of_other_rows(source: random.Random, vocab: int, count: int) -> None:
    """The same logits and draw give the same token in any row, beside any neighbours, with or without their filters."""
    logits, draw = random_logits(source, vocab), random_draw(source)
    tokens = set()
    for quiet in (False, False, False, True):
        batch = [random_logits(source, vocab) for _ in range(count)]
        draws = [IDLE if quiet else random_draw(source) for _ in range(count)]
        at = source.randrange(count)
        batch[at], draws[at] = logits, draw
        tokens.add(int(sample(torch.tensor(batch), draws)[at]))
    assert len(tokens) == 1
    assert logits[tokens.pop()] > -INF


@settings(max_examples=100)
@given(SOURCES, st.integers(2, 300))
def test_filters_of_neighbours_do_not_move_a_bit(source: random.Random, vocab: int) -> None:
    """This is checked on the logits, not only on the token: a row without filters leaves the filtering as it came."""
    draws = [SAMPLED if row % 2 else random_draw(source) for row in range(6)]
    scaled = torch.tensor([[source.gauss(0, 5) for _ in range(vocab)] for _ in draws])
    filtered = sampling._filtered(scaled, draws)
    assert torch.equal(filtered[1::2], scaled[1::2])
    assert torch.equal(filtered[::2][filtered[::2] > -INF], scaled[::2][filtered[::2] > -INF])


@settings(max_examples=100)
@given(SOURCES, st.integers(2, 50))
def test_filters_keep_what_their_definition_says(source: random.Random, vocab: int) -> None:
    """Compare with the definition in double precision, with a small tolerance at the edges of top_p and min_p."""
    batch = [random_logits(source, vocab) for _ in range(8)]
    draws = [random_draw(source) for _ in batch]
    for token, logits, draw in zip(sample(torch.tensor(batch), draws).tolist(), batch, draws, strict=True):
        assert token in allowed(logits, draw)


def allowed(logits: Sequence[float], draw: Draw, slack: float = 1e-4) -> set[int]:
    top = max(logits)
    if draw.temperature == 0:
        return {logits.index(top)}
    weights = [math.exp((value - top) / draw.temperature) for value in logits]
    likely = [i for i, weight in enumerate(weights) if weight > 0 and weight >= draw.min_p * (1 - slack)]
    ordered = sorted(likely, key=lambda i: (-logits[i], i))[: draw.top_k or None]
    total, before, chosen = sum(weights[i] for i in ordered), 0.0, set()
    for i in ordered:
        if before / total < draw.top_p + slack:
            chosen.add(i)
        before += weights[i]
    return chosen


VALUES = st.floats(allow_nan=True, allow_infinity=True, width=32)
ANY_DRAW = st.builds(
    Draw,
    temperature=VALUES,
    top_k=st.integers(0, 2**31 - 1),
    top_p=VALUES,
    min_p=VALUES,
    seed=st.integers(0, 2**63 - 1),
    position=st.integers(0, 2**32),
)


@settings(max_examples=200)
@given(st.lists(VALUES, min_size=9, max_size=9), ANY_DRAW, SOURCES)
def test_a_token_is_in_the_vocabulary_whatever_the_row_and_its_draw_are(
    row: list[float], draw: Draw, source: random.Random
) -> None:
    """The token has a chance of being drawn, or is reported as meaningless. The row beside it does not change."""
    neighbour, beside = random_logits(source, 9), random_draw(source)
    tokens, sound = sampling.sample(torch.tensor([row, neighbour]), [draw, beside])
    assert 0 <= tokens[0] < 9
    assert math.isfinite(row[tokens[0]]) or not sound[0]
    if any(math.isnan(value) or value == INF for value in row) or max(row) == -INF:
        assert not sound[0]
    alone = sampling.sample(torch.tensor([[0.0] * 9, neighbour]), [IDLE, beside])
    assert (tokens[1], sound[1]) == (alone[0][1], alone[1][1])
    assert sound[1]


def test_exact_sums_have_exact_logarithms() -> None:
    """Each of n equal logits, in any places, has the probability 1/n; all other tokens are masked."""
    for count in (1, 2, 64, 100):
        logits = torch.full((2, 2 * PART + 17), -INF)
        logits[:, :: 2 * PART // count][:, :count] = 3.0
        found = log_probabilities(logits, torch.tensor([0, 1]))
        assert found[0] == -torch.tensor(float(count)).log()
        assert found[1] == -INF


@pytest.mark.parametrize("vocab", [1, PART - 1, PART, PART + 1, 2 * PART + 17])
def test_log_probabilities_are_those_of_the_whole_row(vocab: int) -> None:
    """Compare with double precision, and with the same rows in other places, bit for bit."""
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(vocab)) * 5
    tokens = logits.argmax(dim=-1)
    found = log_probabilities(logits, tokens)
    expected = logits.double().log_softmax(dim=-1).gather(-1, tokens[:, None]).squeeze(-1)
    assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    assert torch.equal(log_probabilities(logits.flip(0), tokens.flip(0)), found.flip(0))


@pytest.mark.parametrize("bad", [[NAN, 1.0], [1.0, INF], [-INF, -INF]])
def test_a_row_that_is_not_finite_has_no_log_probability(bad: list[float]) -> None:
    logits = torch.tensor([[0.5, 2.0], bad, [0.5, 2.0]])
    found = log_probabilities(logits, torch.tensor([1, 1, 1]))
    assert found.isnan().tolist() == [False, True, False]
    assert found[0] == found[2]


TIES = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, 3.0, 1e-40, -1e-40]


@given(
    st.lists(st.lists(st.sampled_from(TIES), min_size=9, max_size=9), min_size=1, max_size=5),
    st.integers(1, 9),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_likeliest_tokens_are_in_order_and_the_lower_id_is_first_of_equal_ones(
    values: list[list[float]], count: int, dtype: torch.dtype
) -> None:
    logits = torch.tensor(values, dtype=dtype)
    stable = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :count]
    assert torch.equal(top_tokens(logits, count), stable)


def test_alternatives_follow_from_the_row_alone() -> None:
    """More rows ask than are searched at a time, each for another number; the last two rows belong to nobody."""
    live, vocab = 2 * PIECE_ROWS + 3, 50
    logits = torch.randn(live + 2, vocab, generator=torch.Generator().manual_seed(1)).round(decimals=1)
    counts = [row % 7 for row in range(live)]
    tokens, values = alternatives(logits, counts, log_probabilities)
    assert tokens.shape == values.shape == (live + 2, 6)
    assert (tokens >= 0).sum(dim=-1).tolist() == [*counts, 0, 0]
    for row in (1, 6, live - 1):
        (alone,), (own,) = alternatives(logits[row : row + 1], counts[row : row + 1], log_probabilities)
        assert torch.equal(alone, tokens[row, : len(alone)])
        assert torch.equal(own, values[row, : len(alone)])


def test_tokens_without_a_finite_logit_are_no_alternatives() -> None:
    logits = torch.full((1, 40), -math.inf)
    logits[0, 7] = 2.0
    tokens, _ = alternatives(logits, [20], log_probabilities)
    assert tokens[0].tolist() == [7, *[-1] * 19]
