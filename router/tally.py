"""The router's counts of its requests and samples, since it started. This module must not know who shows them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from corun.errors import CorunError, kind_of
from corun.observe.figures import LATENCIES_S, STEPS_S, Histogram

REFUSALS = ("contract_mismatch", "invalid_argument", "overloaded", "permission_denied", "unauthenticated")
"""The kinds of errors that refuse a request, in this form or at this time. All other errors count as failures."""


class Ending:
    """How one request ends."""

    def __init__(self) -> None:
        self.has_finished: Callable[[], bool] = lambda: False
        """A function that returns whether the client was sent everything."""
        self.error: Callable[[], CorunError | None] = lambda: None
        """A function that returns the error that ended the request's output early; None if there was none."""


class Tally:
    """The counts, as plain numbers. They are written only in the event loop."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()
        """The number of ended requests, by outcome (finished, cancelled, refused, failed) and the error's kind."""
        self.resumed = 0
        """The number of requests that came back for the rest of their output."""
        self.retries: Counter[str] = Counter()
        """The number of runs that a node failed: the node was "lost" in the run, or answered with a "fault"."""
        self.prompt_tokens = 0
        """The prompt tokens of finished samples."""
        self.output_tokens = 0
        """The tokens delivered to clients by runs that have ended."""
        self.queue_s = Histogram(LATENCIES_S)
        """The seconds that each run waited for a slot."""
        self.first_token_s = Histogram(LATENCIES_S)
        """The seconds from a request's arrival to a sample's first token, for every sample that got one."""
        self.token_s = Histogram(STEPS_S)
        """The mean seconds per token of a finished sample, over its tokens after the first."""
        self.finished_s = Histogram(LATENCIES_S)
        """The seconds from a request's arrival to the end of a finished sample."""

    @contextmanager
    def request(self) -> Iterator[Ending]:
        """Count one request when it ends, whatever its outcome."""
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
        """Count a sample that has finished. Times are on the loop's clock."""
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
