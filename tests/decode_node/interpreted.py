"""The GPU's sampling path on Triton's interpreter: our kernels, and around them vLLM's own V2 sampler and its kernels.

`tests/decode_node/test_logprob_kernels.py` runs these tests in a process of their own, since Triton decides when it is
imported whether it interprets. Faked are a GPU's memory (CPU tensors stand in), the runner and lm_head, whose logits a
test gives. The interpreter sums as numpy does; a GPU sums in another order, which these tests say nothing about.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.loading import load

# vLLM turns Triton off where it sees no GPU (vllm/triton_utils/importing.py).
_found = ModuleType("vllm.triton_utils")
_device_functions = SimpleNamespace(log1p=lambda x: tl.log(1.0 + x))  # The interpreter has none of CUDA's.
vars(_found).update(HAS_TRITON=True, triton=triton, tl=tl, tldevice=_device_functions)
vars(_found).update(LOG2E=1.4426950408889634, LOGE2=0.6931471805599453)
sys.modules["vllm.triton_utils"] = _found

worker: Any = load("decode_node.worker")
logprob_kernels: Any = load("corun.node.vllm.logprob_kernels")
draw_and_score, PART = logprob_kernels.draw_and_score, logprob_kernels.PART
buffer_utils: Any = load("vllm.v1.worker.gpu.buffer_utils")
Sampler: Any = load("vllm.v1.worker.gpu.sample.sampler").Sampler
RequestState: Any = load("vllm.v1.worker.gpu.states").RequestState
SamplingParams: Any = load("vllm.sampling_params").SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # The interpreter's own.
NAN, INF = float("nan"), float("inf")
VOCAB = 300
PROMPT, OUTPUT = [5, 6, 7], [9, 9]
"""Each request's prompt, and what it has drawn so far."""


class HostBuffer:
    """Stands in for memory that CPU and GPU share (vllm/v1/worker/gpu/buffer_utils.py: `UvaBuffer`)."""

    def __init__(self, size: Any, dtype: torch.dtype) -> None:
        self.cpu = self.uva = torch.zeros(size, dtype=dtype)
        self.np = self.cpu.numpy()


@pytest.fixture(autouse=True)
def _memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(buffer_utils, "UvaBuffer", HostBuffer)
    for module in (buffer_utils, sys.modules["vllm.v1.worker.gpu.sample.penalties"]):
        monkeypatch.setattr(module, "async_tensor_h2d", lambda x, dtype, device: torch.tensor(x, dtype=dtype))
    # The interpreter cannot run vLLM's filter in Triton; this is the one that vLLM uses below 8 rows.
    filters = load("vllm.v1.sample.ops.topk_topp_sampler").apply_top_k_top_p_pytorch
    monkeypatch.setattr(load("vllm.v1.worker.gpu.sample.sampler"), "apply_top_k_top_p", filters)
    np.seterr(all="ignore")
    with torch.inference_mode():
        yield


def logits_of(rows: int, vocab: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16, pad: int = 0) -> torch.Tensor:
    """Return random logits. pad: the number of columns behind the vocabulary, as of a padded lm_head."""
    noise = torch.randn(rows, vocab + pad, generator=torch.Generator().manual_seed(seed)) * 5
    return noise.to(dtype)[:, :vocab]


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return logits.argmax(dim=-1), logits


def bits(values: torch.Tensor) -> list[int]:
    return [int(value) for value in values.numpy().view(np.uint32)]


def reference(row: torch.Tensor, token: int) -> int:
    """Return the bits of a token's log probability, by the definition in numpy and fp32."""
    vocab = len(row)
    values = np.full(-(-vocab // PART) * PART, -np.inf, dtype=np.float32)
    values[:vocab] = row.float().numpy()
    parts = values.reshape(-1, PART)
    most = parts.max(axis=1)
    shift = np.where(np.isneginf(most), np.float32(0), most)
    sums = np.array([np.exp(part - low).sum() for part, low in zip(parts, shift, strict=True)], dtype=np.float32)
    wide = 1 << (len(parts) - 1).bit_length()
    each = np.pad(most, (0, wide - len(parts)), constant_values=-np.inf)
    total = (np.pad(sums, (0, wide - len(parts))) * np.exp(each - each.max())).sum()
    return int((values[token] - each.max() - np.log(total)).astype(np.float32).view(np.uint32))


@pytest.mark.parametrize("vocab", [1, 5, PART - 1, PART, PART + 1, 2 * PART + 17])
@pytest.mark.parametrize(("dtype", "pad"), [(torch.bfloat16, 0), (torch.bfloat16, 7), (torch.float32, 0)])
@pytest.mark.parametrize("changes", [False, True])
def test_log_probabilities_are_those_of_the_definition(vocab: int, dtype: torch.dtype, pad: int, changes: bool) -> None:
    logits = logits_of(3, vocab, dtype=dtype, pad=pad)
    tokens, found = draw_and_score(greedy, logits, changes=changes)
    assert tokens.tolist() == logits.argmax(dim=-1).tolist()
    assert bits(found) == [reference(row, token) for row, token in zip(logits, tokens.tolist(), strict=True)]


def alone_and_among_others(score: Callable[..., Any], logits: torch.Tensor) -> tuple[int, list[int]]:
    """Return the bits of row 0 as the only row, and in batches of two sizes as their first and last row."""
    (alone,) = bits(score(greedy, logits[:1], changes=False)[1])
    among = []
    for rows in (2, 5):
        for place in {0, rows - 1}:
            batch = logits[1 : rows + 1].clone()
            batch[place] = logits[0]
            among.append(bits(score(greedy, batch, changes=place > 0)[1])[place])
    return alone, among


def test_a_rows_bits_depend_on_no_other_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over parts whose size follows the number of rows, as kernels do that fill a GPU, are found out."""
    logits = logits_of(6, PART + 17)
    alone, among = alone_and_among_others(draw_and_score, logits)
    assert among == [alone] * len(among)

    def by_rows(draw: Any, given: torch.Tensor, *, changes: bool) -> Any:
        monkeypatch.setattr(logprob_kernels, "PART", PART // 2 ** min(6, len(given)))
        return draw_and_score(draw, given, changes=changes)

    alone, among = alone_and_among_others(by_rows, logits)
    assert among != [alone] * len(among)


def test_the_raw_logits_stay_while_the_sampler_works_in_place() -> None:
    """Without the copy, the log probability would be of what the sampler has left."""
    logits = logits_of(2, VOCAB)
    kept = logits.clone()
    _, expected = draw_and_score(greedy, logits, changes=False)

    def in_place(given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return greedy(given.div_(4))

    _, found = draw_and_score(in_place, logits, changes=True)
    assert torch.equal(logits, kept)
    assert bits(found) == bits(expected)
    _, broken = draw_and_score(in_place, logits, changes=False)
    assert bits(broken) != bits(expected)


def test_a_row_that_is_not_finite_gets_nan_and_touches_no_other() -> None:
    """vLLM's argmax gives a number beyond the vocabulary for a row of NaN, and leaves raw logits as they are."""
    rows = [
        [0.5, -0.0, 2.0],
        [NAN] * 3,
        [1.0, 2.0, 3.0],
        [-INF] * 3,
        [1.0, INF, 3.0],
        [1.0, NAN, 3.0],
        [0.5, -0.0, 2.0],
    ]
    logits = torch.tensor(rows)

    def draw(given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        given[2, 1] = INF
        return torch.tensor([1, 4, 1, 0, 1, 2, 1]), given

    tokens, found = draw_and_score(draw, logits, changes=True)
    assert tokens.tolist() == [1, 2, 1, 0, 1, 2, 1]
    assert found.isfinite().tolist() == [True, *[False] * 5, True]
    assert found[1:-1].isnan().all()
    (alone,) = bits(draw_and_score(lambda given: (torch.tensor([1]), given), logits[:1], changes=False)[1])
    assert [bits(found)[0], bits(found)[-1]] == [alone, alone]


def mask(logits: torch.Tensor, batch: Any, names: Sequence[str], masks: Any) -> None:
    """Do what vLLM's `StructuredOutputsWorker` does, with its own kernel, but without its streams."""
    kernel = load("vllm.v1.worker.gpu.structured_outputs")._apply_grammar_bitmask_kernel
    at = torch.tensor([batch.req_ids.index(name) for name in names], dtype=torch.int32)
    words = torch.from_numpy(masks)
    kernel[(len(names), 1)](logits, logits.stride(0), at, words, words.stride(0), logits.shape[-1], BLOCK_SIZE=8192)


class Node:
    """A V2 runner as far as sampling sees it: vLLM's sampler and request states, and logits instead of a model."""

    def __init__(self, slots: int) -> None:
        host = torch.device("cpu")
        states = RequestState(slots, 64, slots, 0, VOCAB, host)
        self.max_num_reqs = slots
        self.sampler: Any = Sampler(slots, VOCAB, host, states)
        self.model = SimpleNamespace(compute_logits=self._compute)
        self.sample: Callable[..., Any]
        self.structured_outputs_worker = SimpleNamespace(apply_grammar_bitmask=mask)
        self._logits = torch.empty(0)
        self.shapes: list[int] = []
        self._states = states

    def _compute(self, hidden: torch.Tensor) -> torch.Tensor:
        """Take each row's number for its hidden state."""
        self.shapes.append(len(hidden))
        return self._logits[hidden[:, 0].long()].clone()

    def step(self, requests: Sequence[tuple[Any, torch.Tensor]], masks: Any = None) -> tuple[list[int], list[int]]:
        """Return the tokens of these requests in one step, and the bits of their log probabilities."""
        output = self.output(requests, masks)
        logprobs = output.logprobs_tensors.to_cpu_nonblocking().tolists().logprobs
        return output.sampled_token_ids[:, 0].tolist(), bits(torch.from_numpy(logprobs[:, 0].copy()))

    def output(self, requests: Sequence[tuple[Any, torch.Tensor]], masks: Any = None) -> Any:
        """Return the sampler's output of these requests in one step."""
        live = len(requests)
        self._logits = torch.stack([logits for _, logits in requests])
        for place, (params, _) in enumerate(requests):
            name = f"r{place}"
            self._states.remove_request(name)
            self._states.free_indices = [place]
            self._states.add_request(name, len(PROMPT), PROMPT + OUTPUT, len(PROMPT + OUTPUT) - 1, 9)
            self.sampler.add_request(place, len(PROMPT), params)
        self._states.apply_staged_writes()
        self.sampler.apply_staged_writes()
        places = torch.arange(live, dtype=torch.int32)
        batch = SimpleNamespace(
            num_reqs=live,
            req_ids=[f"r{place}" for place in range(live)],
            idx_mapping=places,
            idx_mapping_np=places.numpy(),
            expanded_idx_mapping=places,
            expanded_local_pos=torch.zeros(live, dtype=torch.int32),
            positions=torch.full((live,), len(PROMPT + OUTPUT) - 1),
            input_ids=torch.full((live,), OUTPUT[-1], dtype=torch.int32),
            seq_lens=torch.full((live,), len(PROMPT + OUTPUT), dtype=torch.int32),
            cu_num_logits=torch.arange(live + 1, dtype=torch.int32),
            logits_indices=torch.arange(live),
        )
        output, counts, rejected = self.sample(torch.arange(live, dtype=torch.float32)[:, None], batch, masks)
        assert (counts.tolist(), rejected.tolist()) == ([1] * live, [0] * live)
        return output


def node(slots: int = 16, sizes: Sequence[int] = (1, 2, 8, 16)) -> Node:
    made = Node(slots)
    worker.fix_shapes_v2(made, lambda live: worker.rows_of_step(live, sizes))
    return made


STYLES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 1.0},
    "temperature": {"temperature": 0.6},
    "top_k": {"temperature": 1.0, "top_k": 3},
    "top_p": {"temperature": 1.0, "top_p": 0.5},
    "min_p": {"temperature": 1.0, "min_p": 0.2},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.5},
    "presence": {"temperature": 1.0, "presence_penalty": 1.0},
    "frequency": {"temperature": 1.0, "frequency_penalty": 1.0},
    "bias": {"temperature": 0.0, "logit_bias": {9: 50.0}},
    "allowed": {"temperature": 1.0, "allowed_token_ids": [3, 4]},
    "min_tokens": {"temperature": 1.0, "min_tokens": 4, "stop_token_ids": [3]},
}


def params(style: str) -> Any:
    made = SamplingParams(seed=11, max_tokens=9, detokenize=False, **STYLES[style])
    made._all_stop_token_ids = set(made.stop_token_ids or ())
    return made


def row_of(seed: int) -> torch.Tensor:
    """Return one request's logits. vLLM's kernels run in fp32 here, since the interpreter lacks some of bfloat16."""
    return logits_of(1, VOCAB, seed=seed, dtype=torch.float32)[0]


def test_requests_draw_and_score_as_alone_in_any_company() -> None:
    """Every style of sampling, on vLLM's sampler: the log probability is of the raw logits, and neighbours change
    neither token nor bits. It is known which styles make vLLM change the logits in place: if one did so unknown, its
    log probability would be of something else."""
    rows = {style: row_of(number) for number, style in enumerate(STYLES)}
    alone, crowd = {}, list(STYLES)
    for style in STYLES:
        made, changed = node(), []
        draw = made.sampler.sample

        def watched(logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            before = logits.clone()
            result = draw(logits, *args, **kwargs)  # noqa: B023
            changed.append(not torch.equal(logits[0], before[0]))  # noqa: B023
            return result

        made.sampler.sample = watched
        (token,), (found,) = made.step([(params(style), rows[style])])
        alone[style] = token, found
        assert found == reference(rows[style], token), style
        assert changed == [worker.changes_logits(params(style))], style
    assert alone["bias"][0] == 9
    for order in (crowd[::-1], crowd[3:] + crowd[:3]):
        found_together = zip(*node().step([(params(style), rows[style]) for style in order]), strict=True)
        assert dict(zip(order, found_together, strict=True)) == alone


def test_a_start_compiles_each_filter_that_requests_may_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the alignment of a step's logits, which Triton compiles by: these are part of wider rows."""
    compiled = set[tuple[Any, ...]]()

    def note(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> None:
        compiled.add((*logits.shape, logits.stride(0) % 16, k is not None, p is not None))

    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: None)
    monkeypatch.setattr(worker, "apply_top_k_top_p", note)
    worker.compile_draws(VOCAB, torch.float32, torch.device("cpu"))
    assert compiled == {(16, VOCAB, 0, *asked) for asked in ((True, False), (False, True), (True, True))}


def asks(style: str, count: int) -> Any:
    made = params(style)
    made.extra_args = {"kv_transfer_params": {"corun_tops": count}}
    return made


def test_alternatives_have_the_bits_that_their_tokens_would_have() -> None:
    """They are of the raw logits, whatever the draw leaves of these in place, and follow from the row's own."""
    scheduler: Any = load("decode_node.scheduler")
    requests = [
        (asks("plain", 2), row_of(0)),
        (params("plain"), row_of(1)),
        (asks("repetition", 5), row_of(2)),
        (asks("bias", 1), row_of(3)),
    ]
    output = node().output(requests)
    lists = output.logprobs_tensors.to_cpu_nonblocking().tolists()
    for place, count in enumerate((2, 0, 5, 1)):
        row = requests[place][1]
        ids = row.argsort(descending=True)[:count].tolist()
        assert scheduler.alternatives_of(lists, place) == [*ids, *(reference(row, token) for token in ids)]
        if count:
            alone = node().output(requests[place : place + 1]).logprobs_tensors.tolists()
            assert scheduler.alternatives_of(alone, 0) == scheduler.alternatives_of(lists, place)
    free = [
        (params(style), row) for style, (_, row) in zip(("plain", "plain", "repetition", "bias"), requests, strict=True)
    ]
    plain = node().output(free)
    assert plain.logprobs_tensors.logprob_token_ids.numel() == 0, "nothing is computed where nobody asks"
    assert plain.sampled_token_ids.tolist() == output.sampled_token_ids.tolist()
    assert bits(plain.logprobs_tensors.logprobs[:, 0]) == bits(output.logprobs_tensors.logprobs[:, 0].contiguous())


def test_lm_head_and_sampler_have_a_multiple_of_16_rows() -> None:
    """vLLM's filters choose another algorithm below 8 rows."""
    made, row = node(24, (1, 24)), row_of(0)
    for live in (1, 2):
        made.step([(params("plain"), row)] * live)
    assert made.shapes == [16, 32]


@pytest.mark.parametrize("style", ["greedy", "plain", "top_k"])
def test_a_constrained_row_draws_what_it_may_and_tells_the_log_probability_of_all(style: str) -> None:
    """Its neighbours draw as they did, and it draws as it does alone. The control is the row without its mask."""
    requests = [(params(style), row_of(place)) for place in range(3)]
    free_tokens, free_bits = node().step(requests)
    other = (free_tokens[1] + 1) % VOCAB
    allowed = np.zeros((1, -(-VOCAB // 32)), dtype=np.uint32)
    allowed[0, other // 32] = 1 << other % 32

    def masked(name: str) -> Any:
        return SimpleNamespace(structured_output_request_ids=[name], grammar_bitmask=allowed.view(np.int32))

    tokens, found = node().step(requests, masked("r1"))
    assert (tokens, found) == (
        [free_tokens[0], other, free_tokens[2]],
        [free_bits[0], reference(row_of(1), other), free_bits[2]],
    )
    assert node().step(requests[1:2], masked("r0")) == ([other], [found[1]])


def test_rows_beyond_the_requests_repeat_them_in_turn() -> None:
    batch = SimpleNamespace(num_reqs=3)
    for start, name in enumerate(("logits_indices", "expanded_idx_mapping", "expanded_local_pos")):
        setattr(batch, name, torch.arange(3) + 10 * start)
    found = [column.tolist() for column in worker.columns(batch, 8)]
    turns = list(itertools.islice(itertools.cycle(range(3)), 8))
    assert found == [[10 * start + turn for turn in turns] for start in range(3)]
    assert worker.columns(batch, 3)[0] is batch.logits_indices, "nothing is copied where nothing is padded"
