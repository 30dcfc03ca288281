"""Two sets of named tensors side by side: how far apart, and whether that is rounding.

A tensor passes when its largest difference is at most ``tolerance`` times its scale: the largest entry of the
reference, but not below 1 % of the largest entry of its kind (an entry that is zero in exact arithmetic is rounding of
that size in both). Integer and boolean tensors must be equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

FLOOR = 1e-2


@dataclass(frozen=True)
class Row:
    """One tensor compared. ``difference`` and ``scale`` are absolute; ``problem`` says what is not a number."""

    kind: str
    name: str
    difference: float
    scale: float
    tolerance: float
    problem: str = ""

    @property
    def relative(self) -> float:
        """Difference over scale (0 when both are 0)."""
        return self.difference / self.scale if self.difference else 0.0

    @property
    def ok(self) -> bool:
        return not self.problem and self.difference <= self.tolerance * self.scale

    def as_dict(self) -> dict[str, Any]:
        """Plain data; a difference that is no finite number is None."""
        finite = math.isfinite(self.difference)
        return {
            "kind": self.kind, "name": self.name, "ok": self.ok, "difference": self.difference if finite else None,
            "scale": self.scale, "tolerance": self.tolerance, "problem": self.problem,
        }


def compare_kind(
    kind: str,
    reference: Mapping[str, torch.Tensor | None],
    got: Mapping[str, torch.Tensor | None],
    tolerance: float,
) -> list[Row]:
    """Compare tensors of one kind by name; a None, a shape or a dtype that differs is a problem of its row."""
    floor = FLOOR * max((largest(t) for t in reference.values() if t is not None), default=0.0)
    rows = []
    for name in dict.fromkeys((*reference, *got)):
        if name not in got or name not in reference:
            rows.append(Row(kind, name, 0.0, 0.0, tolerance, "missing" if name not in got else "not in the reference"))
            continue
        rows.append(compare_tensors(kind, name, reference[name], got[name], tolerance, floor))
    return rows


def compare_tensors(
    kind: str, name: str, reference: torch.Tensor | None, got: torch.Tensor | None, tolerance: float, floor: float
) -> Row:
    """One row; ``floor``: the least scale."""
    if reference is None or got is None:
        problem = "" if reference is got else "none, the reference has one" if got is None else "the reference has none"
        return Row(kind, name, 0.0, 0.0, tolerance, problem)
    if reference.shape != got.shape or reference.dtype != got.dtype:
        mine, other = (f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in (got, reference))
        return Row(kind, name, 0.0, 0.0, tolerance, f"{mine}, the reference {other}")
    if not (reference.is_floating_point() or reference.is_complex()):
        apart = int((reference != got).sum())
        return Row(kind, name, float(apart), 0.0, tolerance)
    scale = max(largest(reference), floor)
    return Row(kind, name, distance(reference, got), scale, tolerance)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference; equal entries (infinities too) count 0, a NaN on one side infinite."""
    if not a.numel():
        return 0.0
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.detach().to(wide), b.detach().to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    apart = torch.where(same, torch.zeros((), dtype=torch.float64), (a - b).abs())
    return float(torch.where(apart.isnan(), torch.inf, apart).max())


def largest(tensor: torch.Tensor) -> float:
    """Largest finite absolute entry."""
    if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    sizes = tensor.detach().to(wide).abs()
    return float(torch.where(sizes.isfinite(), sizes, 0.0).max())


@dataclass(frozen=True)
class Comparison:
    """The report of ``fxpar verify``.

    Attributes:
        title: what was run and what it was compared with.
        rows: every tensor compared.
        failures: whatever else went wrong: a rank's message, replicas that disagree.
        notes: facts for the reader.
    """

    title: str
    rows: tuple[Row, ...]
    failures: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return bool(self.rows) and not self.failures and all(row.ok for row in self.rows)

    def text(self, shown: int = 8) -> str:
        """The verdict, the largest difference of every kind, and the tensors that differ (or the worst ones)."""
        lines = [self.title]
        kinds = list(dict.fromkeys(row.kind for row in self.rows))
        if kinds:
            lines += ["", *summary(self.rows, kinds)]
        wrong = [row for row in self.rows if not row.ok]
        if wrong:
            wrong.sort(key=lambda row: (not row.problem, -row.relative))
            lines += ["", f"{len(wrong)} of {len(self.rows)} tensors differ"]
            lines += [f"  {line(row)}" for row in wrong[:shown]]
            if len(wrong) > shown:
                lines.append(f"  and {len(wrong) - shown} more (--json shows all)")
        lines += [f"  {part}" for note in self.notes for part in note.splitlines()]
        for failure in self.failures:
            lines += ["", failure]
        lines += ["", "equal" if self.ok else "NOT equal"]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, worst rows first."""
        rows = sorted(self.rows, key=lambda row: (row.ok, not row.problem, -row.relative))
        return {
            "ok": self.ok, "title": self.title, "rows": [row.as_dict() for row in rows],
            "failures": list(self.failures), "notes": list(self.notes),
        }


def summary(rows: Iterable[Row], kinds: Sequence[str]) -> list[str]:
    """One line per kind: how many, and the largest relative difference with its name."""
    rows = list(rows)
    lines = []
    for kind in kinds:
        own = [row for row in rows if row.kind == kind]
        worst = max(own, key=lambda row: row.relative)
        name = f"  ({worst.name})" if len(own) > 1 and worst.difference else ""
        lines.append(
            f"  {kind:<10} {len(own):>5}  largest difference {worst.difference:.1e} of {worst.scale:.1e}, "
            f"{worst.tolerance:.0e} relative allowed{name}"
        )
    return lines


def line(row: Row) -> str:
    """A row as text."""
    if row.problem:
        return f"{row.kind} {row.name}: {row.problem}"
    return f"{row.kind} {row.name}: differs by {row.difference:.3e} of {row.scale:.3e} ({row.relative:.1e} relative)"
