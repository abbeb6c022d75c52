"""How tokens are scored: in pieces of a fixed number of rows, whoever else is scored, on both of vLLM's runners."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from corun.node.kv.handle import TARGETS_PARAM
from corun.node.vllm.logprobs import log_probabilities
from prefill_node.scoring import Scorer
from tests.loading import load

HIDDEN, VOCAB = 8, 300
SCORER = Scorer(16, log_probabilities)
DRAW = torch.Generator().manual_seed(1)
LM_HEAD = torch.randn((HIDDEN, VOCAB), generator=DRAW)


def lm_head(hidden: torch.Tensor) -> torch.Tensor:
    """A last layer whose bits follow its number of rows, as real ones' may."""
    return hidden @ LM_HEAD + len(hidden) * 1e-3 * torch.arange(VOCAB)


def tokens(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(count)
    hidden = torch.randn((count, HIDDEN), generator=draw)
    return hidden, torch.randint(VOCAB, (count,), generator=draw)


def bits(found: tuple[torch.Tensor, torch.Tensor]) -> list[bytes]:
    """Return the bytes of each token's results."""
    tops, logprobs = found
    return [tops[i].numpy().tobytes() + logprobs[i].numpy().tobytes() for i in range(len(tops))]


@pytest.mark.parametrize("count", [1, 15, 16, 17, 40])
def test_a_token_has_the_bits_that_it_has_alone(count: int) -> None:
    hidden, targets = tokens(count)
    alone = [bits(SCORER.score(lm_head, hidden[i : i + 1], targets[i : i + 1]))[0] for i in range(count)]
    assert bits(SCORER.score(lm_head, hidden, targets)) == alone


def test_pieces_of_other_numbers_of_rows_would_have_other_bits() -> None:
    """The negative control: a piece that is as long as what is scored."""
    hidden, targets = tokens(7)
    alone = bits(replace(SCORER, rows=1).score(lm_head, hidden, targets))
    together = bits(replace(SCORER, rows=7).score(lm_head, hidden, targets))
    assert all(a != b for a, b in zip(alone, together, strict=True))


def test_scores_are_log_probabilities_of_the_targets_and_of_the_likeliest_tokens() -> None:
    hidden, targets = tokens(20)
    tops, logprobs = SCORER.score(lambda rows: rows @ LM_HEAD, hidden, targets)
    wanted = (hidden @ LM_HEAD).log_softmax(dim=-1)
    assert torch.equal(tops, wanted.argmax(dim=-1))
    assert logprobs.dtype == torch.float32
    assert torch.allclose(logprobs[:, 0], wanted.gather(-1, targets[:, None])[:, 0], atol=1e-5)
    assert torch.allclose(logprobs[:, 1], wanted.amax(dim=-1), atol=1e-5)


def test_logits_that_are_not_finite_have_no_score_and_touch_no_other_row() -> None:
    hidden, targets = tokens(3)
    sound = bits(SCORER.score(lm_head, hidden, targets))
    hidden[1, 0] = torch.nan
    _, logprobs = found = SCORER.score(lm_head, hidden, targets)
    assert logprobs[1].isnan().all()
    assert (bits(found)[0], bits(found)[2]) == (sound[0], sound[2])


@dataclass
class Prompt:
    """A prompt on its way through steps, on a fake runner."""

    name: str
    hidden: torch.Tensor
    targets: list[int]
    computed: int = 0
    params: Any = None

    def __post_init__(self) -> None:
        transfer = {TARGETS_PARAM: self.targets} if self.targets else {}
        self.params = SimpleNamespace(extra_args={"kv_transfer_params": transfer})


@dataclass
class Runner:
    """The parts of both of vLLM's runners that scores need. `step` returns what a step scores."""

    version: str
    prompts: dict[str, Prompt] = field(default_factory=dict)

    def __post_init__(self) -> None:
        worker: Any = load("prefill_node.worker")
        self.model = SimpleNamespace(compute_logits=lm_head)
        self.device = torch.device("cpu")
        self.requests: dict[str, Any] = {}
        self.lengths = np.zeros(8, dtype=np.int32)
        self.req_states = SimpleNamespace(prompt_len=SimpleNamespace(np=self.lengths))
        self.prompt_logprobs_worker: Any = None
        self._get_prompt_logprobs_dict: Any = None
        getattr(worker, f"score_in_steps_{self.version}")(self, SCORER)

    def add(self, prompt: Prompt) -> None:
        place = len(self.prompts)
        self.prompts[prompt.name] = prompt
        self.lengths[place] = len(prompt.hidden)
        state = {"sampling_params": prompt.params, "num_prompt_tokens": len(prompt.hidden), "num_computed_tokens": 0}
        self.requests[prompt.name] = SimpleNamespace(**state)
        if self.version == "v2":
            self.prompt_logprobs_worker.add_request(prompt.name, place, prompt.params)

    def step(self, **counts: int) -> dict[str, Any]:
        parts, starts = [], [0]
        for name, count in counts.items():
            prompt = self.prompts[name]
            self.requests[name].num_computed_tokens = prompt.computed
            parts.append(prompt.hidden[prompt.computed : prompt.computed + count])
            starts.append(starts[-1] + count)
        hidden, computed = torch.cat(parts), [self.prompts[name].computed for name in counts]
        for name, count in counts.items():
            self.prompts[name].computed += count
        if self.version == "v2":
            batch = SimpleNamespace(
                req_ids=list(counts), query_start_loc_np=np.array(starts), num_computed_prefill_tokens_np=computed
            )
            found = self.prompt_logprobs_worker.compute_prompt_logprobs(lm_head, hidden, batch, None, None, None)
        else:
            self.query_start_loc = SimpleNamespace(np=np.array(starts))
            self.input_batch = SimpleNamespace(req_id_to_index={name: i for i, name in enumerate(counts)})
            found = self._get_prompt_logprobs_dict(hidden, counts)
        return dict(found)


@pytest.fixture(params=["v1", "v2"])
def runner(request: pytest.FixtureRequest) -> Runner:
    return Runner(request.param)


def test_a_prompt_is_scored_over_its_chunks_beside_prompts_that_are_not(runner: Runner) -> None:
    hidden, targets = tokens(30)
    runner.add(Prompt("kv", tokens(9)[0], []))
    runner.add(Prompt("mine", hidden, targets[-20:].tolist()))
    assert runner.step(kv=4, mine=7) == {}, "no token of it is scored yet"
    assert runner.step(mine=14, kv=5) == {}
    found = runner.step(mine=9)["mine"]
    assert bits((found.logprob_token_ids, found.logprobs)) == bits(SCORER.score(lm_head, hidden[-20:], targets[-20:]))


def test_a_prompt_whose_beginning_was_cached_is_scored_alike(runner: Runner) -> None:
    hidden, targets = tokens(12)
    runner.add(Prompt("mine", hidden, targets[-4:].tolist(), computed=8))
    found = runner.step(mine=4)["mine"]
    assert bits((found.logprob_token_ids, found.logprobs)) == bits(SCORER.score(lm_head, hidden[-4:], targets[-4:]))


def test_a_changed_token_is_another_score(runner: Runner) -> None:
    hidden, targets = tokens(5)
    runner.add(Prompt("one", hidden, targets.tolist()))
    targets[2] += 1 if targets[2] == 0 else -1
    runner.add(Prompt("other", hidden, targets.tolist()))
    found = runner.step(one=5, other=5)
    same = found["one"].logprobs[:, 0] == found["other"].logprobs[:, 0]
    assert same.tolist() == [True, True, False, True, True]


def test_a_request_that_ends_early_leaves_nothing() -> None:
    runner = Runner("v2")
    runner.add(Prompt("mine", tokens(9)[0], [1, 2, 3, 4]))
    runner.step(mine=7)
    runner.prompt_logprobs_worker.remove_request("mine")
    assert runner.prompt_logprobs_worker._scored == {}
