"""What `fxpar rules check` found: how much of every rule was run, and what is wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fxpar.rules.soundness import Counterexample

SHOWN = 3
"""Counterexamples shown of a rule."""


@dataclass(frozen=True)
class Judged:
    """One op (or one call of a program): what was run, and what is wrong with its rule.

    ``examples``: a call on a mesh under one joint choice. ``uneven`` of them left ranks pieces of unequal size,
    ``empty`` left some rank nothing; ``split`` used a choice other than computing the whole on every rank.
    """

    op: str
    calls: int
    examples: int
    uneven: int
    empty: int
    split: int
    place: str = ""
    problems: tuple[Counterexample, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {
            "op": self.op, "calls": self.calls, "examples": self.examples, "uneven": self.uneven, "empty": self.empty,
            "split": self.split, "place": self.place,
            "problems": [
                {"mesh": p.mesh, "choice": list(p.choice), "layouts": list(p.layouts), "problem": p.problem}
                for p in self.problems
            ],
        }


@dataclass(frozen=True)
class RuleCheck:
    """What was judged; ``ok`` when no counterexample was found.

    ``wanted``: examples asked for of every entry. ``undeclared``: ops computed whole, without a rule.
    """

    judged: tuple[Judged, ...]
    meshes: tuple[str, ...]
    wanted: int
    undeclared: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        return not any(entry.problems for entry in self.judged)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for --json."""
        return {
            "ok": self.ok, "meshes": list(self.meshes), "examples": self.wanted, "undeclared": list(self.undeclared),
            "judged": [entry.as_dict() for entry in self.judged],
        }

    def text(self) -> str:
        """For people: counterexamples first."""
        lines = []
        for entry in self.judged:
            if entry.problems:
                lines.append(f"UNSOUND {entry.op}{f', at {entry.place}' if entry.place else ''}")
                lines += [f"  {problem}" for problem in entry.problems[:SHOWN]]
                more = len(entry.problems) - SHOWN
                lines += [f"  and {more} more counterexamples"] if more > 0 else []
        ops = {entry.op for entry in self.judged}
        bad = {entry.op for entry in self.judged if entry.problems}
        lines.append(
            f"{len(ops) - len(bad)} of {len(ops)} rules are sound, {len(bad)} unsound: "
            f"{sum(entry.examples for entry in self.judged)} examples (call, mesh, choice) of "
            f"{sum(entry.calls for entry in self.judged)} calls, meshes {', '.join(self.meshes)}"
        )
        lines.append(
            f"pieces of unequal size in {sum(entry.uneven for entry in self.judged)} examples, "
            f"a rank without a piece in {sum(entry.empty for entry in self.judged)}"
        )
        if self.judged:
            fewest = min(self.judged, key=lambda entry: entry.examples)
            lines.append(f"fewest examples: {fewest.examples} of {fewest.op}, {self.wanted} wanted")
        short = dict.fromkeys(entry.op for entry in self.judged if entry.examples < self.wanted and not entry.problems)
        lines += [f"fewer examples than wanted: {', '.join(short)}"] if short else []
        splittable = {entry.op for entry in self.judged if entry.split}
        whole = [op for op in dict.fromkeys(entry.op for entry in self.judged) if op not in splittable]
        lines += [f"only computed whole, no other choice in these calls: {', '.join(whole)}"] if whole else []
        if self.undeclared:
            lines.append(f"computed whole, no rule to judge: {', '.join(self.undeclared)}")
        return "\n".join(lines)
