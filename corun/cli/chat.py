"""`corun chat`: talk with the model of a cluster in the terminal."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Annotated

import tyro

from corun.cli.generate import for_terminal, receipts
from corun.cli.options import OptionalInt, RouterOptions, SamplingOptions
from corun.cli.own_cluster import own_cluster
from corun.client.client import Client
from corun.completion import Assembler, Generation
from corun.config.extras import load
from corun.errors import CorunError, InvalidArgumentError, Shown
from corun.models import SMOLLM2
from corun.params import MAX_SEED, SamplingParams, whole_number

HELP = """\
/seed N      draw the next answers with this seed; without N, let the router derive one for each answer again
/receipt     show the seed and the receipt of the last answer
/new         forget what was said
/quit        end; so does Ctrl-D
Ctrl-C ends an answer: what has come of it stays part of the chat."""


@dataclass(frozen=True, kw_only=True)
class ChatRouterOptions(RouterOptions):
    """Which router to call, if any."""

    router: str = ""
    """host:port of a running cluster's router, or several with commas in between; by default a cluster is started."""


@dataclass(frozen=True, kw_only=True)
class ChatSamplingOptions(SamplingOptions):
    """How tokens are drawn; an answer may be longer, and is less random, than elsewhere."""

    max_tokens: int = 512
    """Most tokens of an answer."""
    temperature: float = 0.2
    """The sampling temperature: 0, which is greedy, or in [0.01, 2]."""


@dataclass(frozen=True, kw_only=True)
class Chat:
    """Talk with the model in the terminal: its answers stream, and it knows what was said before.

    examples:
      corun chat                               starts a cluster with smollm2, which ends with the chat
      corun chat --router 127.0.0.1:50051      talks to the model of a running cluster
      corun chat --seed 42 --system "You answer in one sentence."

    /help lists what may be typed. The same messages with the same seed give the same answers, bit by bit.
    """

    model: str = SMOLLM2
    """The model of the cluster that is started: a name, a path, or an id on the hub."""
    system: str = ""
    """What the model is told first; without it, the model's chat template says it."""
    seed: OptionalInt = None
    """Seed in [0, 2^63) of every answer; without one, the router derives a seed for each."""
    cluster: tyro.conf.OmitArgPrefixes[ChatRouterOptions] = field(default_factory=ChatRouterOptions)
    sampling: Annotated[ChatSamplingOptions, tyro.conf.OmitArgPrefixes] = field(default_factory=ChatSamplingOptions)

    def run(self) -> int:
        params = self.sampling.params()
        if params.n != 1:
            raise InvalidArgumentError("n", params.n, "must be 1 in a chat")
        templates = load("corun.chat", "corun chat", "router")
        with suppress(ImportError):  # Some Pythons come without it. Then a line cannot be edited, and that is all.
            importlib.import_module("readline")
        with ExitStack() as stack:
            address = self.cluster.router or stack.enter_context(
                own_cluster(self.model, {"colocated": 1}, lambda line: print(line, file=sys.stderr, flush=True))
            )
            client = stack.enter_context(replace(self.cluster, router=address).client())
            template = templates.ChatTemplate(client.get_chat_template())
            Conversation(client, template.render, params, seed=self.seed, system=self.system).talk()
        return 0


class Conversation:
    """What was said so far, and how the next line is answered."""

    def __init__(
        self, client: Client, render: Callable[..., str], params: SamplingParams, *, seed: int | None, system: str
    ) -> None:
        self._client = client
        self._render = render
        self._params = params
        self._seed = seed
        self._first = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._first)
        self._last: Generation | None = None
        self._is_tty = sys.stdin.isatty()

    def talk(self) -> None:
        """Answer lines until there are no more. In a terminal an error is shown, and the chat goes on."""
        if self._is_tty:
            print("/help lists what may be typed.")
        while True:
            try:
                try:
                    line = self._typed()
                except (EOFError, KeyboardInterrupt):
                    if self._is_tty:
                        print()
                    return
                if line == "/quit":
                    return
                if line.startswith("/"):
                    self._obey(line)
                elif line:
                    self._answer(line)
            except CorunError as error:
                if not self._is_tty:
                    raise
                print(f"corun: {error}", file=sys.stderr)

    def _typed(self) -> str:
        """Return the next line. Raises InvalidArgumentError if its bytes are no text."""
        try:
            return input("> " if self._is_tty else "").strip()
        except UnicodeDecodeError as error:
            found = Shown(f"{len(error.object)} bytes")
            raise InvalidArgumentError("line", found, f"must be text in {error.encoding}") from None

    def _obey(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        if command == "/seed":
            self._seed = _seed(rest.strip())
            print("each answer gets a seed of its own" if self._seed is None else f"seed {self._seed}")
        elif command == "/receipt":
            print(receipts(self._last) if self._last else "there is no whole answer yet")
        elif command == "/new":
            self._messages, self._last = list(self._first), None
        elif command == "/help":
            print(HELP)
        else:
            raise InvalidArgumentError("command", command, "must be /seed, /receipt, /new, /help or /quit")

    def _answer(self, line: str) -> None:
        """Stream the answer to a line. The line and what came of the answer become part of the chat."""
        messages = [*self._messages, {"role": "user", "content": line}]
        prompt = self._client.tokenize(self._render(messages), add_special_tokens=False).token_ids
        assembler, text = Assembler(1, prompt), ""
        self._last = None
        try:
            for chunk in self._client.stream(prompt, self._params, seed=self._seed):
                assembler.add(chunk)
                text += chunk.text
                print(for_terminal(chunk.text) if sys.stdout.isatty() else chunk.text, end="", flush=True)
            self._last = assembler.finish()
        except KeyboardInterrupt:
            print(" …", end="")
        finally:
            print(flush=True)
        if text:
            self._messages = [*messages, {"role": "assistant", "content": text}]


def _seed(word: str) -> int | None:
    if not word:
        return None
    seed = whole_number(word)
    if seed is None or seed > MAX_SEED:
        raise InvalidArgumentError("seed", word, "must be in [0, 2^63)")
    return seed
