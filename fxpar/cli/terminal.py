"""What a command shows: its answer on stdout, progress of long work on stderr."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from fxpar.progress import Progress, silent


class Report(Protocol):
    """The answer of verify and check."""

    @property
    def ok(self) -> bool:
        """Whether the answer is yes."""
        ...

    def text(self) -> str:
        """For people."""
        ...

    def as_dict(self) -> dict[str, Any]:
        """For --json: plain data."""
        ...


def show_report(report: Report, *, as_json: bool) -> int:
    """Print the report; returns the exit code."""
    print(json.dumps(report.as_dict()) if as_json else report.text())
    return 0 if report.ok else 1


def make_progress(*, as_json: bool) -> Progress:
    """Progress on stderr when a person watches it, else none."""
    if as_json or not sys.stderr.isatty():
        return silent
    from rich.console import Console

    console = Console(stderr=True)

    @contextmanager
    def show(phase: str, /) -> Iterator[None]:
        start = time.monotonic()
        with console.status(phase):
            yield
        console.print(f"{phase} [dim]{time.monotonic() - start:.1f} s[/dim]", highlight=False)

    return show
