"""What a router counts of its requests and samples, since it started. Must not know who shows it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from corun.errors import CorunError, kind_of
from corun.observe.figures import LATENCIES_S, STEPS_S, Histogram

REFUSALS = ("contract_mismatch", "invalid_argument", "overloaded", "permission_denied", "unauthenticated")
"""Of the errors that end a request, those that say: not this request, or not now. The others are failures."""


class Ending:
    """How one request ends."""

    def __init__(self) -> None:
        self.has_finished: Callable[[], bool] = lambda: False
        """Whether its client was sent everything."""
        self.error: Callable[[], CorunError | None] = lambda: None
        """What ended it before that, as its output knows."""


class Tally:
    """Plain numbers, written in the event loop."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()
        """Ended, by outcome (finished, cancelled, refused, failed) and the error's kind."""
        self.resumed = 0
        """Requests that came back for the rest of their output."""
        self.retries: Counter[str] = Counter()
        """Runs of samples that a node failed: it was "lost" in them, or answered with a "fault"."""
        self.prompt_tokens = 0
        """Of finished samples."""
        self.output_tokens = 0
        """Delivered, by runs that have ended."""
        self.queue_s = Histogram(LATENCIES_S)
        """Wait for a slot, of every run."""
        self.first_token_s = Histogram(LATENCIES_S)
        """From a request's arrival, of every sample that got one."""
        self.token_s = Histogram(STEPS_S)
        """Of a finished sample's tokens after its first, the mean."""
        self.finished_s = Histogram(LATENCIES_S)
        """From a request's arrival to a sample's end."""

    @contextmanager
    def request(self) -> Iterator[Ending]:
        """Counts one request when it ends, however it does."""
        ending = Ending()
        raised: CorunError | None = None
        try:
            yield ending
        except CorunError as error:
            raised = error
            raise
        finally:
            self.requests[_outcome(ending, raised or ending.error())] += 1

    def note_sample(self, arrived: float, first_token: float | None, num_prompt: int, num_tokens: int) -> None:
        """A sample has finished; times are on the loop's clock."""
        now = asyncio.get_running_loop().time()
        self.prompt_tokens += num_prompt
        self.finished_s.observe(now - arrived)
        if first_token is not None and num_tokens > 1:
            self.token_s.observe((now - first_token) / (num_tokens - 1))


def _outcome(ending: Ending, error: CorunError | None) -> tuple[str, str]:
    if error is not None:
        kind = kind_of(error)
        return ("refused" if kind in REFUSALS else "failed", kind)
    return ("finished" if ending.has_finished() else "cancelled", "")
