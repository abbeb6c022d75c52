"""The decode node's vLLM engine: it runs fixed-shape steps over KV that was read from prefill nodes.

Owns: the engine's arguments, the way of requests into the engine and of whole steps out of it. Must not know: gRPC,
leases, routers.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from corun.config.fields import DecodeConfig
from corun.contract import Contract
from corun.errors import InvalidArgumentError, Shown, UnavailableError
from corun.node.certificate import Certificate, untested
from corun.node.kv.handle import OWN_PROMPT_PARAM, STAMPS_PARAM, TOPS_PARAM, owner, read_id
from corun.node.kv.handshake import UNDER_WAY
from corun.node.kv.stamps import stamps
from corun.node.vllm import start as base
from corun.node.vllm.facts import decode_contract, model_contract
from corun.params import SamplingParams, check_prompt, check_seed, check_vocabulary
from corun.processes import living, started
from corun.types import NO_ALTERNATIVES, Alternatives, FinishReason, Freedom, KvReads, NixlEndpoint, NodeRole
from decode_node.grammar import Trials
from decode_node.service import DecodeRequest, OwnPrompt, StepRow
from decode_node.slots import smaller_than

CONNECT_TIMEOUT_S = 20.0
CONNECT_POLL_S = 0.05
LAST_REPORT_S = 2.0
REPORT_S = 5.0
LET_GO_S = 2.0
NOT_FINITE = "the logits of the next token are not finite"
_FILTERS = ("top_p", "top_k", "min_p")
_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
_SAME = ("temperature", *_FILTERS, "max_tokens", "min_tokens", *_PENALTIES)
"""The parameters that vLLM has under the same name, with the same meaning."""
MAX_HELD_BACK = 128
"""The largest number of stop tokens that a sample's `min_tokens` can hold back. With more, the GPU runner crashes its
engine (vllm/v1/worker/gpu/sample/logit_bias.py: `MAX_NUM_STOP_TOKEN_IDS`)."""
log = logging.getLogger(__name__)


def arguments(config: DecodeConfig, endpoint: NixlEndpoint) -> Any:
    """Pin the environment, then return the engine's `AsyncEngineArgs`.

    Raises InvalidArgumentError for a setting that this platform cannot keep.
    """
    base.prepare(config, NodeRole.DECODE, endpoint)
    from vllm import AsyncEngineArgs

    base.check_split(config.decode_split)
    made = AsyncEngineArgs(
        **base.shared_arguments(config, [NodeRole.DECODE], endpoint, longest_wait_s=config.prefill_first_ms / 1000),
        scheduler_cls="decode_node.scheduler.FixedSlotScheduler",
        worker_cls="decode_node.worker.FixedShapeWorker",
        max_num_seqs=config.slots,
        max_num_batched_tokens=max(config.slots, base.compiled_tokens()) if base.on_gpu() else config.slots,
    )
    if base.on_gpu():
        made.compilation_config = base.gpu_graphs("FULL_DECODE_ONLY", [*smaller_than(config.slots), config.slots])
        made.attention_config = base.gpu_attention(made, config.decode_split)
    return made


class VllmDecodeEngine:
    """Implements `decode_node.service.DecodeEngine` on `AsyncLLM`. Build it with `launch`."""

    def __init__(
        self, llm: Any, facts: base.EngineFacts, contract: Contract, certificate: Certificate, engine_id: str
    ) -> None:
        self.facts = facts
        self.engine_id = engine_id
        self.contract = contract
        self.certificate = certificate
        """What the node may do, by its own test, and why it may not do the rest."""
        self.on_step: Callable[[list[StepRow], int], None] = lambda rows, live: None
        self.on_read: Callable[[list[str]], None] = lambda request_ids: None
        self.on_death: Callable[[], None] = lambda: None
        self.on_finding: Callable[[str], None] = lambda finding: None
        self.steps = 0
        """The number of steps since the engine's start."""
        self.step_sizes: list[int]
        """The numbers of rows that steps may have, ascending; `launch` sets them."""
        self.kv_reads = KvReads()
        """The KV reads so far, as of a few seconds ago."""
        self._llm = llm
        self._logged: dict[int, dict[str, float]] = {}  # rank -> the figures of KV reads that were last logged
        self._mapped: dict[int, str] = {}  # process id -> start time, for processes whose GPU memory is mapped here
        self._tasks: list[asyncio.Task[None]] = []
        self._trials: Trials

    @classmethod
    async def launch(cls, config: DecodeConfig, endpoint: NixlEndpoint) -> VllmDecodeEngine:
        """Load the model and start the engine (`base.started`)."""
        llm, seen, facts = await base.started(arguments(config, endpoint))
        contract = decode_contract(model_contract(llm, config, seen), seen, facts)
        reasons = untested(config, NodeRole.DECODE, facts.finding)
        decided_by = base.deciding_facts(llm, config, contract, seen, facts)
        sizes, certificate = await certify_rows(llm, reasons[Freedom.ROWS], decided_by)
        engine = cls.of(llm, facts, contract, certificate, endpoint.engine_id, [*sizes, config.slots])
        llm.on_outputs, llm.on_dead = engine.take, engine.note_dead
        return engine

    @classmethod
    def of(
        cls,
        llm: Any,
        facts: base.EngineFacts,
        contract: Contract,
        certificate: Certificate,
        engine_id: str,
        step_sizes: list[int],
    ) -> VllmDecodeEngine:
        """Return the decode side of a started engine, which does not hear of its outputs yet."""
        engine = cls(llm, facts, contract, certificate, engine_id)
        engine.step_sizes = step_sizes
        path = Path(llm.vllm_config.model_config.model) / "tokenizer.json"
        engine._trials = Trials(path, facts.vocab_size, facts.eos_token_ids)
        engine._tasks = [asyncio.create_task(engine._report()), asyncio.create_task(engine._let_go())]
        return engine

    @property
    def shares(self) -> bool:
        """Whether samples of a prompt share its blocks. vLLM may switch its prefix cache off by itself."""
        return bool(self._llm.vllm_config.cache_config.enable_prefix_caching)

    async def start(self, request: DecodeRequest) -> None:
        """See `DecodeEngine.start`.

        Raises:
            InvalidArgumentError: the engine would refuse a parameter, change it or crash on it, or the model is too
                short for the prompt and its output, or lacks a token of it; names the field.
            OverloadedError: its constraint could not be tried in time.
            UnavailableError: the engine died.
        """
        prompt = request.prompt_token_ids
        check_prompt(prompt, request.params.max_tokens, self.facts.max_model_len, self.facts.vocab_size)
        if request.params.constraint is not None:
            await self._trials.check(*request.params.constraint)
        transfer = self._transfer(request)
        if request.params.top_logprobs:
            transfer[TOPS_PARAM] = request.params.top_logprobs
        sampling = engine_params(request.params, request.seed, self.facts, {"kv_transfer_params": transfer})
        asked = base.core_request(request.request_id, prompt, sampling, request.share_key or None)
        await base.unless_dead(self._llm.engine_core.add_request_async(asked), self.on_death)

    def _transfer(self, request: DecodeRequest) -> dict[str, Any]:
        """Return the parameters with which vLLM reads the KV."""
        transfer: dict[str, Any] = {"do_remote_prefill": True, "do_remote_decode": False}
        if isinstance(request.kv, OwnPrompt):  # The scheduler fills in where it is, once it knows.
            own, node = request.kv, request.kv.prefill_node
            return transfer | {
                "remote_engine_id": self.engine_id,
                "remote_request_id": read_id(own.prefill_id, request.request_id),  # The worker counts no such reader.
                "remote_block_ids": [[]],
                "remote_host": "",
                "remote_port": 0,
                "tp_size": 1,
                OWN_PROMPT_PARAM: [own.prefill_id, node.node_id, node.generation],
            }
        handle = request.kv
        owners = [(owner(one.request_id, handle.prefill_node), one.num_blocks) for one in handle.owners]
        return transfer | {
            "remote_engine_id": handle.engine_id,
            "remote_request_id": read_id(handle.request_id, handle.claim),
            "remote_block_ids": [list(group) for group in handle.block_ids],
            "remote_host": handle.host,
            "remote_port": handle.port,
            "tp_size": handle.tp_size,
            STAMPS_PARAM: stamps(owners, request.prompt_token_ids, self.facts.block_size),
        }

    async def abort(self, request_id: str) -> None:
        await self._llm.engine_core.abort_requests_async([request_id])

    async def connect(self, peer: NixlEndpoint) -> None:
        """See `DecodeEngine.connect`.

        Raises:
            UnavailableError: the handshake or a first read failed, or took longer than 20 s; says why.
        """
        if peer.engine_id == self.engine_id:  # Its KV is here.
            return
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        where = (peer.engine_id, peer.host, peer.port, peer.tp_size, peer.stamp_addresses)
        for call in (("connect", *where), ("warm", peer.engine_id)):
            answers = {UNDER_WAY}
            while UNDER_WAY in answers:
                ranks = await base.call_workers(self._llm, *call, timeout_s=CONNECT_TIMEOUT_S)
                answers = {str(rank) for rank in ranks}
                failures = answers - {"", UNDER_WAY}
                if not failures and UNDER_WAY in answers and time.monotonic() > deadline:
                    failures = {f"the handshake took longer than {CONNECT_TIMEOUT_S:.0f} s"}
                if failures:
                    reason = "; ".join(sorted(failures))
                    raise UnavailableError(f"no NIXL connection to {peer.host}:{peer.port}: {reason}")
                if UNDER_WAY in answers:
                    await asyncio.sleep(CONNECT_POLL_S)
        for pids in await base.call_workers(self._llm, "mapped_pids", timeout_s=CONNECT_TIMEOUT_S):
            self._mapped |= {pid: at for pid, at in started(pids).items() if pid not in self._mapped}

    async def _let_go(self) -> None:
        """Unmap the GPU memory of prefill nodes that have died. Otherwise they could not start again on their GPU."""
        while True:
            await asyncio.sleep(LET_GO_S)
            try:
                dead = sorted(self._mapped.keys() - living(self._mapped))
                if dead and all(await base.call_workers(self._llm, "unmap", dead, timeout_s=CONNECT_TIMEOUT_S)):
                    log.info("let go of the GPU memory of processes that have ended: %s", dead)
                    self._mapped = {pid: at for pid, at in self._mapped.items() if pid not in dead}
            except Exception as error:  # A worker's errors share no base.
                log.warning("GPU memory of processes that have ended is still mapped: %s", error)

    async def answer(self) -> None:
        """See `corun.node.watchdog.Engine.answer`."""
        await base.answer(self._llm)

    def computed_s(self) -> float:
        """See `corun.node.watchdog.Engine.computed_s`."""
        return base.computed_s(self.contract)

    async def _report(self) -> None:
        """Log the new KV reads every `REPORT_S` seconds, if there was a step in that time.

        A read is counted before the first row of its request, so without a new step there are no new reads to ask for.
        Only reads of aborted requests may be missing then; they are logged with the next ones. Asking keeps an idle
        worker spinning for a second, so it is avoided.
        """
        seen = self.steps
        while True:
            await asyncio.sleep(REPORT_S)
            if self.steps != seen:
                seen = self.steps
                await self._log_handoffs(CONNECT_TIMEOUT_S)

    async def _log_handoffs(self, timeout_s: float) -> None:
        """Log one line per rank on the KV reads since the last report, if there were any and the engine answers."""
        try:
            ranks = await base.call_workers(self._llm, "handoffs", timeout_s=timeout_s)
        except UnavailableError as error:
            log.warning("KV reads are not known: %s", error)
            return
        self.kv_reads = KvReads(**{field.name: ranks[0][field.name] for field in fields(KvReads)})
        for rank, done in enumerate(ranks):
            before = self._logged.get(rank, dict.fromkeys(done, 0))
            new = {name: done[name] - before[name] for name in done}
            speed = new["bytes"] / new["seconds"] / 1e9 if new["seconds"] else 0.0
            if any(new.values()):
                log.info("KV reads of rank %d: %s, %.2f GB/s each", rank, new, speed)
            self._logged[rank] = done

    async def close(self) -> None:
        """End the engine's processes."""
        for task in self._tasks:
            task.cancel()
        await self._trials.close()
        if not self._llm.errored:
            await self._log_handoffs(LAST_REPORT_S)
        base.end(self._llm)

    def note_dead(self) -> None:
        self.on_death()

    def take(self, outputs: list[Any]) -> None:
        """Turn one engine step into rows, after the news of reads (decode_node/scheduler.py: `update_from_output`)."""
        self.steps += 1
        read = [one.request_id for one in outputs if not one.new_token_ids and one.finish_reason is None]
        if read:
            self.on_read(read)
        if len(read) < len(outputs):
            live = next((output.new_token_ids[2] for output in outputs if output.new_token_ids), 0)
            self.on_step(_rows(outputs), live)


def engine_params(params: SamplingParams, seed: int, facts: base.EngineFacts, extra_args: dict[str, Any]) -> Any:
    """Return vLLM's parameters for one sample. The router handles stop strings, because only tokens exist here.

    Routers check the same limits before they begin. If a parameter passes there, because a router or an engine has
    other limits, it is refused here with its name, since no other node would accept it either.

    Raises:
        InvalidArgumentError: vLLM would refuse a parameter, change it or crash on it.
    """
    from vllm.sampling_params import SamplingParams as VllmSamplingParams

    check_seed(seed)
    check_vocabulary(params, facts.vocab_size)
    try:
        made = VllmSamplingParams(
            **{name: getattr(params, name) for name in _SAME},
            seed=seed,
            stop_token_ids=_stops(params, facts.eos_token_ids),
            ignore_eos=True,
            logit_bias=dict(params.logit_bias) or None,
            logprobs=None,  # The worker computes the drawn token's for every request, since receipts always need it.
            detokenize=False,
            extra_args=extra_args,
            structured_outputs=_structured_outputs(params),
        )
    except (TypeError, ValueError) as error:  # vLLM's validation errors are of these types.
        words = str(*error.args[:1])  # They begin with the parameter's name.
        name = words.partition(" ")[0]
        if name not in _SAME:
            refused = Shown("refused by the engine")
            raise InvalidArgumentError("sampling_params", refused, words) from None
        raise InvalidArgumentError(f"sampling_params.{name}", getattr(params, name), words) from None
    for name in _SAME:
        asked, taken = getattr(params, name), getattr(made, name)
        if asked != taken and not (params.greedy and name in _FILTERS):  # vLLM resets filters of greedy samples.
            raise InvalidArgumentError(f"sampling_params.{name}", asked, f"the engine would take it for {taken}")
    return made


def _structured_outputs(params: SamplingParams) -> Any:
    """Return vLLM's parameters of a constraint; None if there is none."""
    from vllm.sampling_params import StructuredOutputsParams

    if params.constraint is None:
        return None
    kind, text = params.constraint
    return StructuredOutputsParams(**{kind: json.loads(text) if kind == "choice" else text})


def _stops(params: SamplingParams, eos_token_ids: Sequence[int]) -> list[int]:
    """Return the tokens that end the sample. Raises InvalidArgumentError if they are too many to be held back."""
    eos = () if params.ignore_eos else eos_token_ids
    stops = sorted({*params.stop_token_ids, *eos})
    if params.min_tokens and len(stops) > MAX_HELD_BACK:
        limit = (
            f"must be at most {MAX_HELD_BACK - len(eos)}, since the model has {len(eos)} end tokens of its own and the "
            f"engine room for {MAX_HELD_BACK}"
        )
        raise InvalidArgumentError("sampling_params.stop_token_ids", Shown(f"{len(stops)} token ids"), limit)
    return stops


async def certify_rows(llm: Any, reason: str, decided_by: Mapping[str, Any] | None) -> tuple[list[int], Certificate]:
    """Let the engine run steps with fewer rows than slots if every rank finds that they give the same bits.

    reason: why this is not tested; empty: it is. decided_by: see `base.certify_freedoms`.

    Returns:
        These numbers of rows, ascending, and the certificate that says why there are none.
    """
    certificate, ranks = await base.certify_freedoms(llm, {Freedom.ROWS: reason}, decided_by)
    common = sorted(set.intersection(*(set(rank["sizes"]) for rank in ranks))) if certificate.held else []
    if certificate.held and not common:
        certificate = certificate.without(Freedom.ROWS, "the ranks agree on no number of rows")
    if ranks:
        await base.call_workers(llm, "use_rows", common, timeout_s=base.OBSERVE_TIMEOUT_S)
        log.info("steps may have %s rows beside all slots", common or "no other number of")
    return common, certificate


def _rows(outputs: Sequence[Any]) -> list[StepRow]:
    """Return the rows of one step. A drawn token comes with the bits of its log probability.

    At its first invalid token a request ends. Both samplers give such a token a log probability that is not finite. It
    has gone into the engine's next step already, but only this request reads it there.
    """
    bits = [output.new_token_ids[1] for output in outputs if output.new_token_ids]
    logprobs = iter(struct.unpack(f"<{len(bits)}f", struct.pack(f"<{len(bits)}I", *bits)))
    rows = []
    for output in outputs:
        reason = output.finish_reason
        finish, detail = (None, "") if reason is None else _end(str(reason))
        if not output.new_token_ids:
            invalid = isinstance(output.stop_reason, str)
            detail = output.stop_reason if invalid else detail
            rows += [StepRow(output.request_id, None, 0.0, finish, detail, invalid=invalid)] if finish else []
        elif math.isfinite(logprob := next(logprobs)):
            tops = _tops(output.new_token_ids[3:])
            rows.append(StepRow(output.request_id, output.new_token_ids[0], logprob, finish, detail, tops=tops))
        else:
            ended = FinishReason.ERROR, NOT_FINITE
            rows.append(StepRow(output.request_id, None, 0.0, *ended, not_finite=True))
    return rows


def _tops(numbers: Sequence[int]) -> Alternatives:
    """Return the alternatives of a row from their ids and as many bits of log probabilities."""
    if not numbers:
        return NO_ALTERNATIVES
    count = len(numbers) // 2
    values = struct.unpack(f"<{count}f", struct.pack(f"<{count}I", *numbers[count:]))
    return Alternatives(tuple(numbers[:count]), values)


def _end(reason: str) -> tuple[FinishReason, str]:
    """Return how a request ended by vLLM's reason, and the words for an end that is no output's own."""
    if reason in ("stop", "length"):
        return FinishReason(reason), ""
    return FinishReason.ERROR, f"the engine ended the request: {reason}"
