"""A picture that fills the terminal and is drawn again as its data change, until a key, Ctrl-C or a signal ends it.

Owns the terminal while it is shown: the alternate screen, the keyboard, its size, Ctrl-Z. It leaves the terminal as it
found it, however it ends. It must not know what is shown.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

TERMINATED = 128 + 15
"""The exit code after SIGTERM, as a shell would tell it."""
_REDRAW_S = 1.0
"""The longest time between two drawings, so that what is said of the age of data stays true."""
_ESCAPES = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    b"\x1b[H": "home",
    b"\x1b[F": "end",
}


def can_show() -> bool:
    """Return whether stdout is a terminal that can show a picture."""
    return sys.stdout.isatty() and not Console().is_dumb_terminal


class Screen:
    """The whole terminal.

    draw: returns what is shown on such a terminal. keys: what is called when a key is pressed, by its character. hint:
    what the last line says; the keys for scrolling and for the end are added.
    """

    def __init__(
        self,
        draw: Callable[[ConsoleOptions], RenderableType],
        *,
        keys: Mapping[str, Callable[[], None]],
        hint: Callable[[], str],
    ) -> None:
        self._draw, self._keys, self._hint = draw, keys, hint
        self._console = Console(highlight=False, markup=False)
        self._offset = 0
        self._keyboard: int | None = None
        self._saved: Any = None
        self._code: int | None = None
        self._changed = asyncio.Event()

    async def run(self, ask: Callable[[], Awaitable[None]], interval_s: float) -> int:
        """Show the picture, and call `ask` again and again for what it shows. Return the exit code: 0 after the key q.

        Raises what `ask` raises, and KeyboardInterrupt after Ctrl-C.
        """
        asking = asyncio.create_task(self._ask(ask, interval_s))
        try:
            with self._signals(), self._taken():
                while self._code is None and not asking.done():
                    self._show()
                    self._changed.clear()
                    await self._wait()
        finally:
            asking.cancel()
            found = await asyncio.gather(asking, return_exceptions=True)
        if self._code is None and isinstance(found[0], Exception):
            raise found[0]
        return self._code or 0

    async def _wait(self) -> None:
        # Before Python 3.12, `wait_for` returns although Ctrl-C cancels it, if there is a change at the same moment.
        waiting = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait((waiting,), timeout=_REDRAW_S)
        finally:
            waiting.cancel()

    async def _ask(self, ask: Callable[[], Awaitable[None]], interval_s: float) -> None:
        try:
            while True:
                await ask()
                self._changed.set()
                await asyncio.sleep(interval_s)
        finally:
            self._changed.set()

    def _show(self) -> None:
        width, height = self._console.size
        options = self._console.options.update(width=width, height=None)
        lines = self._console.render_lines(self._draw(options), options)
        room = max(1, height - 1)
        self._offset = max(0, min(self._offset, len(lines) - room))
        shown = lines[self._offset : self._offset + room]
        shown += [[Segment(" " * width)]] * (room - len(shown))
        more = len(lines) > room
        words = [self._hint(), "↑↓ scroll" if more else "", "q quit"]
        hint = "  ".join(word for word in words if word)
        hint = (hint.replace("↑↓", "j/k") if options.ascii_only else hint).ljust(width)
        last = Text(hint, "reverse", no_wrap=True, overflow="crop")
        shown += self._console.render_lines(last, options)[:1]
        self._console.update_screen_lines(shown, 0, 0)

    def _on_input(self) -> None:
        assert self._keyboard is not None
        typed = b""
        with suppress(OSError):  # The terminal's other side is gone, as if nothing were left to read.
            typed = os.read(self._keyboard, 64)
        key = _ESCAPES.get(typed)
        for each in [key] if key else typed.decode("utf-8", "ignore"):
            self._press(each)
        if not typed:
            self._end(0)
        self._changed.set()

    def _press(self, key: str) -> None:
        page = max(1, self._console.size.height - 2)
        moves = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -page, "page down": page, " ": page}
        if key == "q":
            self._end(0)
        elif key in self._keys:
            self._keys[key]()
        elif key in moves:
            self._offset += moves[key]
        elif key in ("home", "end"):
            self._offset = 0 if key == "home" else sys.maxsize

    def _end(self, code: int) -> None:
        self._code = code
        self._changed.set()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Draw again when the terminal's size changes, end on SIGTERM, and stop and continue as a shell wants it."""
        handlers: dict[str, Callable[[], None]] = {
            "SIGWINCH": self._changed.set,
            "SIGTERM": lambda: self._end(TERMINATED),
            "SIGTSTP": self._suspend,
        }
        loop, known = asyncio.get_running_loop(), []
        for name, handler in handlers.items():
            with suppress(AttributeError, NotImplementedError):  # Not all systems have them.
                loop.add_signal_handler(number := getattr(signal, name), handler)
                known.append(number)
        try:
            yield
        finally:
            for number in known:
                loop.remove_signal_handler(number)

    def _suspend(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_signal_handler(signal.SIGTSTP)
        self._give_back()
        os.kill(os.getpid(), signal.SIGTSTP)  # The process stands here until its shell lets it go on.
        loop.add_signal_handler(signal.SIGTSTP, self._suspend)
        self._take()
        self._changed.set()

    @contextmanager
    def _taken(self) -> Iterator[None]:
        quiet = logging.NullHandler()  # Without any handler, Python would print warnings into the picture.
        logging.getLogger().addHandler(quiet)
        self._take()
        try:
            yield
        finally:
            self._give_back()
            logging.getLogger().removeHandler(quiet)

    def _take(self) -> None:
        """Begin to read keys one by one, where the system can, and show the other screen."""
        try:
            import termios  # Windows has none.  # noqa: PLC0415
            import tty  # noqa: PLC0415
        except ImportError:
            pass
        else:
            if sys.stdin.isatty():
                self._keyboard = sys.stdin.fileno()
                self._saved = termios.tcgetattr(self._keyboard)
                tty.setcbreak(self._keyboard)
                asyncio.get_running_loop().add_reader(self._keyboard, self._on_input)
        self._console.set_alt_screen(True)
        self._console.show_cursor(False)

    def _give_back(self) -> None:
        self._console.show_cursor(True)
        self._console.set_alt_screen(False)
        if self._keyboard is not None:
            import termios  # noqa: PLC0415

            asyncio.get_running_loop().remove_reader(self._keyboard)
            termios.tcsetattr(self._keyboard, termios.TCSADRAIN, self._saved)
            self._keyboard = None
