"""Colours of lines that are printed and not drawn: green is right, red is wrong, yellow waits. None outside terminals.

Rich's own consoles follow the same rules. This module is for lines that may be printed above a progress bar, which has
to see them go through `sys.stdout`.
"""

from __future__ import annotations

import sys

from rich.console import Console
from rich.text import Text


def coloured(text: str, style: str, *, stderr: bool = False) -> str:
    """Return a text in a style of rich, or as it is: where its stream is no terminal, and with NO_COLOR."""
    console = Console(stderr=stderr, highlight=False, markup=False)
    if not (sys.stderr if stderr else sys.stdout).isatty() or console.no_color or console.is_dumb_terminal:
        return text
    with console.capture() as captured:
        console.print(Text(text, style), soft_wrap=True, end="")
    return captured.get()
