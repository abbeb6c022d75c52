"""Constraints on outputs: what makes a matcher of one, under limits, and the process that tries each of them first.

    python -m decode_node.grammar TOKENIZER VOCABULARY END_TOKEN...

The matcher is llguidance's, since it stops at fixed amounts of work for a token: a schema that explodes is refused, on
every node alike, before it holds up a step that other samples share. xgrammar, vLLM's default, has no such limits: a
regular expression of 23 characters keeps it busy for seconds. What is left without limits is reading a constraint. So
each is read once in a process that has little time and memory (`Trials`), before its sample starts. As a script this
is that process: it reads constraints from lines of JSON, and answers each with a line. Must not know: vLLM, gRPC.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import resource
import signal
import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import llguidance
import llguidance.numpy
import numpy as np
import numpy.typing as npt

from corun.errors import InternalError, InvalidArgumentError, OverloadedError, Shown

FIELD = "sampling_params.structured_outputs"
LIMITS = llguidance.LLParserLimits(
    max_items_in_row=300,
    initial_lexer_fuel=200_000,
    step_lexer_fuel=20_000,
    step_max_items=1000,
    max_lexer_states=10_000,
    max_grammar_size=30_000,
    verbose_errors=False,
)
"""The most work for a token. It is the same everywhere, unlike time, and the step of all samples waits for it. With
49,152 tokens, what these limits let pass took at most 2 ms a token, and JSON schemas 0.6 ms. With three to five times
as much work an ambiguous grammar took up to 50 ms. A text of 60,000 characters in a constraint takes 20 ms all the
same, 100 ms for the first mask; decode_node/scheduler.py sees to it that others do not wait for it."""
MAX_WORDS = 300
"""The most characters of llguidance's own words in an error. They may repeat the whole constraint."""
TRIAL_S = 0.5
"""The longest processor time of a trial."""
TRIAL_BYTES = 64 * 2**20
"""The most memory that a trial may add to that of its process."""
ANSWER_S = 20.0
"""The longest wait for a trial's answer, in which the process may have to start, too."""
PROCESSES = 2
"""The most constraints that are tried at once: one that takes all of its time holds up no other alone."""
KNOWN = 1024
"""The number of last constraints whose trials are remembered."""
TOO_MUCH = f"must take at most {TRIAL_S:g} s of processor time and {TRIAL_BYTES // 2**20} MiB to read"


def tokenizer(path: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> llguidance.LLTokenizer:
    """Return the vocabulary that matchers work on. This takes up to a second, and holds Python's lock.

    Raises ValueError if the file is none, or lacks an end token of the model.
    """
    return llguidance.LLTokenizer(path.read_text("utf-8"), n_vocab=vocab_size, eos_token=list(eos_token_ids))


class Matcher:
    """What one sample may draw next. An output is complete where an end token is among it."""

    def __init__(self, tokens: llguidance.LLTokenizer, kind: str, text: str) -> None:
        """Read a constraint. Raises ValueError if its text is not one of its kind.

        A first mask is made and thrown away, since it may take ten times as long as the later ones.
        """
        self._ends = frozenset(tokens.eos_tokens)
        self._matcher = llguidance.LLMatcher(tokens, _grammar(kind, text), log_level=0, limits=LIMITS)
        self.finding = self._error()
        """Why nothing can be drawn any more; empty while something can."""
        self.fill(llguidance.numpy.allocate_token_bitmask(1, tokens.vocab_size), 0)

    def copy(self) -> Matcher:
        """Return a matcher in the same state. What one of the two does later, the other does not see. The work that was
        done counts for both, as if both had done it: a copy reaches its limits where a new matcher does."""
        made = copy.copy(self)
        made._matcher = self._matcher.deep_copy()
        return made

    def fill(self, masks: npt.NDArray[np.int32], row: int) -> None:
        """Set the bits of the tokens that may be drawn next; of all tokens if `finding` says that none can."""
        llguidance.numpy.fill_next_token_bitmask(self._matcher, masks, row)
        if not self._is_complete:  # A grammar may name an end token as one of its own.
            words = masks[row].view(np.uint32)
            for token_id in self._ends:
                words[token_id // 32] &= np.uint32(0xFFFFFFFF ^ 1 << token_id % 32)
        self.finding = self._error() or ("" if masks[row].any() else "allows no token but the end, too early")
        if self.finding:  # llguidance would allow the end token, as if the output were complete.
            masks[row] = -1

    def accept(self, token_id: int) -> bool:
        """Go on behind a drawn token. Return False if it may not be drawn; `finding` says if it is beyond a limit."""
        if self.finding:
            return False
        if token_id in self._ends:
            return self._is_complete
        is_taken = bool(self._matcher.consume_token(token_id))
        self.finding = self._error()
        return is_taken

    @property
    def _is_complete(self) -> bool:
        return bool(self._matcher.is_accepting() or self._matcher.is_stopped())

    def _error(self) -> str:
        words = _words(self._matcher.get_error())
        return f"cannot be followed: {words}" if self._matcher.is_error() else ""


def _words(error: object) -> str:
    return str(error).partition("\n")[0][:MAX_WORDS]


def _grammar(kind: str, text: str) -> str:
    if kind == "json":
        return llguidance.LLMatcher.grammar_from_json_schema(text)
    if kind == "choice":  # As one lexeme: each alternative of a rule would count against the limits.
        return llguidance.LLMatcher.grammar_from_lark(
            "start: ONE\nONE: " + " | ".join(map(json.dumps, json.loads(text)))
        )
    return llguidance.grammar_from("regex" if kind == "regex" else "grammar", text)


class Trials:
    """Tries constraints in other processes, a few at a time. A process is started when those before it are busy."""

    def __init__(self, path: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._path = path
        arguments = (str(path), str(vocab_size), *map(str, eos_token_ids))
        self._has_ends = bool(eos_token_ids)
        self._children = [_Child(arguments) for _ in range(PROCESSES)]
        self._idle = self._children[::-1]  # The last one is used next: the first of all, if it is idle.
        self._turns = asyncio.Semaphore(PROCESSES)
        self._asked: dict[tuple[str, str], asyncio.Future[str]] = {}  # The trials that run or wait.
        self._known: OrderedDict[tuple[str, str], str] = OrderedDict()

    async def check(self, kind: str, text: str) -> None:
        """Try a constraint.

        Raises:
            InvalidArgumentError: it cannot be read, allows no output, or is too large.
            OverloadedError: there was no answer in time. The node is as good as any: no fault of it is meant.
            InternalError: the process for it does not start.
        """
        if not self._has_ends or not self._path.is_file():
            raise InvalidArgumentError(
                FIELD, Shown(kind), "must be unset: the model has no end token or tokenizer.json"
            )
        if (finding := self._known.get((kind, text))) is None:
            finding = await self._shared(kind, text)
        if finding:
            raise InvalidArgumentError(f"{FIELD}.{kind}", Shown(f"{len(text)} characters"), finding)

    async def close(self) -> None:
        """End the trials and their processes."""
        asked = tuple(self._asked.values())
        for each in asked:
            each.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        for child in self._children:
            await child.close()

    async def _shared(self, kind: str, text: str) -> str:
        """Return the finding of a trial, one for all that ask for it meanwhile: the samples of a request come together.
        It goes on if one of them leaves."""
        asked = self._asked.get((kind, text))
        if asked is None:
            asked = self._asked[kind, text] = asyncio.ensure_future(self._in_turn(kind, text))
            asked.add_done_callback(lambda ended: self._note(kind, text, ended))
        return await asyncio.shield(asked)

    def _note(self, kind: str, text: str, ended: asyncio.Future[str]) -> None:
        del self._asked[kind, text]
        if ended.cancelled() or ended.exception() or ended.result() == TOO_MUCH:
            return  # A process at a limit may have ended for another reason.
        self._known[kind, text] = ended.result()
        if len(self._known) > KNOWN:
            self._known.popitem(last=False)

    async def _in_turn(self, kind: str, text: str) -> str:
        """Try a constraint after those that came before. The wait for them takes nothing of its own time."""
        try:
            await asyncio.wait_for(self._turns.acquire(), ANSWER_S)
        except asyncio.TimeoutError:
            reason = f"the constraint was not tried within {ANSWER_S:g} s, because others came first"
            raise OverloadedError(reason) from None
        child = self._idle.pop()
        try:
            return await asyncio.wait_for(child.tried(kind, text), ANSWER_S)
        except asyncio.TimeoutError:
            raise OverloadedError(f"the trial of the constraint was not over after {ANSWER_S:g} s") from None
        finally:
            self._idle.append(child)
            self._turns.release()


class _Child:
    """One process that tries constraints. It is started for the first, and again after each that has ended it."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = arguments
        self._process: asyncio.subprocess.Process | None = None

    async def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    async def tried(self, kind: str, text: str) -> str:
        """Return why a constraint is refused; empty if it is not. A process that ended at a limit may have used its
        memory up before, so only a new one's end says something of the constraint."""
        is_new = False
        while not is_new:
            is_new = self._process is None
            try:
                process = await self._started()
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(json.dumps([kind, text]).encode() + b"\n")
                answer = await process.stdout.readline()
            except ConnectionError:
                answer = b""
            except BaseException:  # A late answer would be taken for the next one's.
                await self.close()
                raise
            if answer:
                return str(json.loads(answer))
            await self.close()
        return TOO_MUCH

    async def _started(self) -> asyncio.subprocess.Process:
        """Return the process once it has said that it is ready. Raises InternalError if it ends before."""
        if self._process is None:
            pipe = asyncio.subprocess.PIPE
            command = (sys.executable, "-m", __name__, *self._arguments)
            # Where memory has run out, a backtrace takes seconds.
            quiet = {**os.environ, "RUST_BACKTRACE": "0"}
            self._process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=quiet)
            assert self._process.stdout is not None
            if not await self._process.stdout.readline():
                await self.close()
                raise InternalError("constraints cannot be tried: the process for it ended, see the node's log")
        return self._process


def trial(tokens: llguidance.LLTokenizer, kind: str, text: str) -> str:
    """Return why a constraint is refused; empty if an output can begin under it."""
    masks = llguidance.numpy.allocate_token_bitmask(1, tokens.vocab_size)
    try:
        matcher = Matcher(tokens, kind, text)
        matcher.fill(masks, 0)
    except ValueError as error:
        return f"must be what its name says: {_words(error)}"
    return matcher.finding


def main(arguments: Sequence[str]) -> None:
    path, vocab_size, *ends = arguments
    unusable = ""
    try:
        tokens = tokenizer(Path(path), int(vocab_size), list(map(int, ends)))
        trial(tokens, "json", "{}")  # What is built only once is in memory now.
    except ValueError as error:
        unusable = f"must be unset, because the model's tokenizer.json does not serve for it: {_words(error)}"
    used = next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "VmData" in line)
    limit = used * 1024 + TRIAL_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print("ready", flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, TRIAL_S)  # Its signal ends the process; no code of ours has to run.
        answer = unusable or trial(tokens, *json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
