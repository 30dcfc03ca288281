"""One thing that ``fxpar check`` looked at, and how it was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One check. ``note``: passed, with something the reader should know."""

    check: str
    outcome: Literal["ok", "note", "problem"]
    text: str = ""

    def line(self) -> str:
        """For people."""
        first, *rest = self.text.splitlines() or [""]
        head = f"{self.outcome:<8} {self.check}{': ' if first else ''}{first}"
        return "\n".join([head, *(f"         {line.strip()}" for line in rest)])
