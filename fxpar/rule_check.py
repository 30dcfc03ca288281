"""`fxpar rules check`: run ops choice by choice on virtual meshes and compare with the whole op.

Judged are example calls of fxpar's own rules (`check_ops`), or every call that a captured program makes
(`check_program`), the user's ops included: once on the values of a real step, then on random floating operands of the
same shapes. See `fxpar.rules.soundness` for what one judgement does.
"""

from __future__ import annotations

import fnmatch
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fxpar import rule_examples  # noqa: F401  declares the generators
from fxpar.capture.retype import ALL_DOUBLE, retype
from fxpar.model_source import ModelSource
from fxpar.plans.errors import FxparError
from fxpar.plans.layout import Dims, Layout, digits
from fxpar.plans.mesh import Mesh
from fxpar.plans.program import Node, Program, node_inputs, refs
from fxpar.progress import Progress, silent
from fxpar.reference import built, widen
from fxpar.rule_coverage import HUB, place_of, rule_name
from fxpar.rule_examples.draw import GENERATORS, Draw
from fxpar.rules.choices import JointChoice, Site
from fxpar.rules.factor_rule import Call, call_of
from fxpar.rules.registry import all_rules, full_name, rule_for
from fxpar.rules.soundness import Counterexample, Example, check_call, run_op
from fxpar.runtime.interpret import call, concrete
from fxpar.step_values import input_values

SHOWN = 3
OPS_PER_PHASE = 40


@dataclass(frozen=True)
class Shards:
    """Which choices are judged: those that leave a rank with a smaller piece (``uneven``) or none (``empty``); all
    when neither is asked for."""

    uneven: bool = False
    empty: bool = False

    def __call__(self, site: Site, choice: JointChoice, mesh: Mesh) -> bool:
        if not (self.uneven or self.empty):
            return True
        lengths = [piece_lengths(d, lay, mesh) for d, lay in zip(site.inputs, choice.inputs, strict=True)]
        some = [found for found in lengths if found]
        return (self.empty and any(0 in found for found in some)) or (
            self.uneven and any(len(found) > 1 for found in some)
        )


def piece_lengths(dims: Dims, layout: Layout, mesh: Mesh) -> set[int]:
    """Elements that ranks hold of a tensor."""
    if 0 in [atom for row in dims for atom in row]:
        return set()
    found = set()
    for rank in range(mesh.world_size):
        size = 1
        for row in digits(dims, layout, mesh, mesh.coordinates(rank)):
            for digit in row:
                size *= digit.length
        found.add(size)
    return found


@dataclass(frozen=True)
class Judged:
    """One op (or one call of a program): how many calls were run, and what is wrong with its rule."""

    op: str
    calls: int
    place: str = ""
    problems: tuple[Counterexample, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {
            "op": self.op, "calls": self.calls, "place": self.place,
            "problems": [
                {"mesh": p.mesh, "choice": list(p.choice), "layouts": list(p.layouts), "problem": p.problem}
                for p in self.problems
            ],
        }


@dataclass(frozen=True)
class RuleCheck:
    """What was judged; ``ok`` when no counterexample was found. ``undeclared``: ops computed whole."""

    judged: tuple[Judged, ...]
    meshes: tuple[str, ...]
    undeclared: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        return not any(entry.problems for entry in self.judged)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for --json."""
        return {
            "ok": self.ok, "meshes": list(self.meshes), "undeclared": list(self.undeclared),
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
        runs = sum(entry.calls for entry in self.judged)
        lines.append(
            f"{len(ops) - len(bad)} of {len(ops)} rules are sound on {runs} calls, meshes {', '.join(self.meshes)}"
        )
        if self.undeclared:
            lines.append(f"computed whole, no rule to judge: {', '.join(self.undeclared)}")
        return "\n".join(lines)


def chosen_ops(patterns: Sequence[str]) -> tuple[str, ...]:
    """Short names (``"mm"``, ``"add.Tensor"``) of the fxpar ops that the patterns name; all when there are none.

    Raises:
        FxparError: a pattern names no op that has a rule and example calls.
    """
    known = {rule.op: short for rule in all_rules() if (short := short_name(rule.op)) in GENERATORS}
    if not patterns:
        return tuple(known.values())
    chosen: dict[str, None] = {}
    for pattern in patterns:
        names = {pattern, full_name(pattern)} if pattern.count(".") < 2 else {pattern}
        found = [
            short for op, short in known.items() if any(fnmatch.fnmatchcase(n, p) for n in (op, short) for p in names)
        ]
        if not found:
            why = "it has a rule but no example calls" if any(map(rule_for, names)) else "no such op has a rule"
            raise FxparError(
                f"cannot check '{pattern}'", numbers=why,
                way_out="fxpar rules list shows names; your own ops are checked on the calls of a model: "
                        "fxpar rules check model.py",
            )
        chosen.update(dict.fromkeys(found))
    return tuple(chosen)


def short_name(op: str) -> str:
    """``"aten.add.Tensor"`` -> ``"add.Tensor"``, ``"mylib.f.default"`` -> ``"mylib::f"``."""
    return rule_name(op).removeprefix("aten::")


def check_ops(
    ops: Sequence[str], meshes: Sequence[Mesh], *, examples: int = 6, limit: int = 16, shards: Shards = Shards(),
    progress: Progress = silent,
) -> RuleCheck:
    """Judge fxpar's rules on example calls.

    Args:
        ops: short names, see :func:`chosen_ops`.
        examples: calls drawn of every generator of an op, on the meshes in turn.
        limit: joint choices run per call (sampled when there are more).
    """
    judged = []
    for start in range(0, len(ops), OPS_PER_PHASE):
        part = ops[start : start + OPS_PER_PHASE]
        with progress(f"ops {start + 1} to {start + len(part)} of {len(ops)}: {part[0]} to {part[-1]}"):
            judged += [check_op(op, meshes, examples, limit, shards) for op in part]
    return RuleCheck(tuple(judged), tuple(map(str, meshes)))


def check_op(op: str, meshes: Sequence[Mesh], examples: int, limit: int, shards: Shards) -> Judged:
    """Judge one op on drawn calls; the draws depend on the op's name only."""
    problems: list[Counterexample] = []
    calls = 0
    base = zlib.crc32(op.encode()) % 100_000
    for number, generate in enumerate(GENERATORS[op]):
        for turn in range(examples):
            given = generate(Draw(base + 1000 * number + turn))
            mesh = meshes[turn % len(meshes)]
            problems += check_call(given, mesh, seed=turn, whole=turn % 4 == 3, limit=limit, keep=shards)
            calls += 1
    return Judged(full_name(op), calls, problems=tuple(problems))


def check_model(
    source: ModelSource, program: Program, meshes: Sequence[Mesh], *, examples: int = 2, limit: int = 8,
    shards: Shards = Shards(), progress: Progress = silent,
) -> RuleCheck:
    """Judge every distinct call of a model's program, on values of one step in float64.

    Args:
        program: captured from the source, any dtype.
        examples: per call and mesh: 1 on the step's values, the others on random floating operands.
    """
    with progress("building the model in float64"):
        model = built(source, torch.float64)
        args, kwargs = widen(source.example_inputs(), torch.float64)
        wide = retype(program, ALL_DOUBLE)
        values = input_values(wide, model, args, kwargs, seed=0)
    with progress("judging every call of a step"):
        return check_program(wide, values, meshes, examples=examples, limit=limit, shards=shards)


def check_program(
    program: Program, values: Mapping[int, Tensor], meshes: Sequence[Mesh], *, examples: int = 2, limit: int = 8,
    shards: Shards = Shards(),
) -> RuleCheck:
    """Run a program whole and judge each distinct call when it is met; equal calls are judged once."""
    judged: list[Judged] = []
    seen: set[Call] = set()
    undeclared: dict[str, None] = {}
    for node, operands in calls_of(program, values):
        made = call_of(node, program)
        if node.op == HUB or made in seen:
            continue
        seen.add(made)
        if rule_for(node.op) is None:
            undeclared[node.op] = None
            continue
        problems: list[Counterexample] = []
        runs = 0
        for turn in range(examples):
            tensors = operands if turn == 0 else redrawn(operands, turn)
            given = Example(node.op, made.args, tensors)
            if turn and not usable(given):
                continue
            for mesh in meshes:
                whole = turn % 2 == 1
                problems += check_call(given, mesh, seed=len(seen) + turn, whole=whole, limit=limit, keep=shards)
                runs += 1
        judged.append(Judged(node.op, runs, place_of(node), tuple(problems)))
    return RuleCheck(tuple(judged), tuple(map(str, meshes)), tuple(undeclared))


def calls_of(program: Program, values: Mapping[int, Tensor]) -> Iterator[tuple[Node, tuple[Tensor, ...]]]:
    """Every node with its operands, in program order, as one step makes them."""
    known: dict[int, Any] = dict(values)
    last_use = {v: n for n, node in enumerate(program.nodes) for arg in node.args for v in refs(arg)}
    with torch.no_grad():
        for n, node in enumerate(program.nodes):
            # rules are judged on operands of plain strides, as ranks hold them
            yield node, tuple(known[v].contiguous() for v in node_inputs(node))
            result = call(node.op, [concrete(arg, known) for arg in node.args], torch.device("cpu"))
            for value, tensor in zip(node.outputs, result if isinstance(result, tuple | list) else (result,),
                                     strict=True):
                if value >= 0:
                    known[value] = tensor
            for value in node_inputs(node):
                if last_use[value] == n:
                    known.pop(value, None)


def redrawn(operands: Sequence[Tensor], turn: int) -> tuple[Tensor, ...]:
    """Floating operands replaced by odd multiples of 1/128 (never 0: sums of infinities are nothing), all positive on
    every second turn; integers and masks stay: only the model knows which ones an op takes."""
    generator = torch.Generator().manual_seed(turn)
    drawn = []
    for tensor in operands:
        if not tensor.is_floating_point():
            drawn.append(tensor)
            continue
        value = (torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * 64).round() / 64 + 1 / 128
        drawn.append((value.abs() if turn % 2 == 0 else value).to(tensor.dtype))
    return tuple(drawn)


def usable(given: Example) -> bool:
    """True when the whole op takes the operands and all that comes out is finite."""
    try:
        results = run_op(given.op, given.args, given.tensors)
    except (RuntimeError, ValueError, ArithmeticError, LookupError):
        return False  # random operands may lie outside an op's domain
    return all(bool(t.isfinite().all()) for t in results if t is not None and t.is_floating_point())

