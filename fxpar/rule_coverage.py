"""Which ops have a rule, and what it costs that the others are computed whole.

Of a program (`program_coverage`), with the user's lines and, given decisions, the bytes really gathered; or of a table
of op counts (`histogram_coverage`). An op without a rule is sound but never split: its operands are gathered on every
rank and the whole op runs on each of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from fxpar.capture.replaced import registered, replacement
from fxpar.plans.layout import Layout, replicated
from fxpar.plans.plan import Decisions
from fxpar.plans.program import Node, Program, node_inputs
from fxpar.plans.reshard import COLLECTIVES, reshard_steps
from fxpar.prices import Prices, step_bytes
from fxpar.rules.choices import JointChoice, choice_by_names, site_of
from fxpar.rules.factor_rule import torch_op
from fxpar.rules.registry import rule_for

HUB = "fxpar.hub.default"
SHOWN_PLACES = 3
_ROW = re.compile(r"\|\s*`([^`|]+)`\s*\|\s*\d+\s*\|\s*(\d+)\s*\|")


class MissingRuleWarning(UserWarning):
    """An op has no rule: it is computed whole on every rank."""


@dataclass(frozen=True)
class Undeclared:
    """An op of a program that has no rule.

    Attributes:
        calls: how often the program calls it.
        places: the user's lines and modules that call it, each once, in program order.
        whole_ns: time that its calls take on every rank, per step.
        gathered_bytes: bytes of the full tensors gathered for its calls, per step: what the decisions gather, or all
            its operands when there are no decisions yet.
        gather_ns: time of gathering them; None without decisions.
        declaration: the line that declares a rule, every dim kept whole: the one to start from.
    """

    op: str
    calls: int
    places: tuple[str, ...]
    whole_ns: int
    gathered_bytes: int
    gather_ns: int | None
    declaration: str

    def text(self) -> str:
        """One paragraph: the op, where, what it costs, the way out."""
        more = f" and {len(self.places) - SHOWN_PLACES} more places" if len(self.places) > SHOWN_PLACES else ""
        where = "; ".join(self.places[:SHOWN_PLACES]) + more
        gathering = "" if self.gather_ns is None else f" ({self.gather_ns} ns)"
        kind = "gathers up to" if self.gather_ns is None else "gathers"
        return (
            f"{self.op} has no rule and is computed whole on every rank{f', at {where}' if where else ''}: "
            f"{self.calls} call{'s take' if self.calls > 1 else ' takes'} {self.whole_ns} ns, "
            f"{kind} {self.gathered_bytes} bytes{gathering} per step; "
            f"to split it declare {self.declaration} in model.py, with one name for dims that run together and no ! "
            "where a dim may be split"
        )


@dataclass(frozen=True)
class Coverage:
    """How much of some ops has a rule: counts of calls and of distinct ops, and the rest."""

    calls: int
    covered_calls: int
    ops: int
    covered_ops: int
    replaced: tuple[tuple[str, int, str], ...] = ()
    undeclared: tuple[Undeclared, ...] = ()
    missing: tuple[tuple[str, int, str], ...] = ()

    @property
    def ok(self) -> bool:
        """True when every op has a rule."""
        return self.covered_ops == self.ops

    def as_dict(self) -> dict[str, Any]:
        """Plain data; times in ns, sizes in bytes."""
        return asdict(self)

    def text(self) -> str:
        """For people."""
        lines = [
            f"{self.covered_calls} of {self.calls} calls ({share(self.covered_calls, self.calls)}) and "
            f"{self.covered_ops} of {self.ops} ops have a rule"
            + (", or capture replaces them before rules are asked" if self.replaced else "")
        ]
        if self.replaced:
            lines += ["", "replaced by capture"]
            lines += [f"  {count:7} {op}: {why}" for op, count, why in self.replaced]
        if self.missing:
            lines += ["", "without a rule"]
            lines += [f"  {count:7} {op}: {why}" for op, count, why in self.missing]
        if self.undeclared:
            lines += ["", *(item.text() for item in self.undeclared)]
        return "\n".join(lines)


def share(part: int, whole: int) -> str:
    """A share for people, never rounded up to all."""
    return f"{int(10000 * part / whole) / 100:.2f} %" if whole else "100 %"


def program_coverage(program: Program, prices: Prices, decisions: Decisions | None = None) -> Coverage:
    """Rules of a program's ops; hubs are fxpar's own and do not count."""
    nodes = [node for node in program.nodes if node.op != HUB]
    counts = Counter(node.op for node in nodes)
    declared = {op: n for op, n in counts.items() if rule_for(op) is not None}
    missing = undeclared_ops(program, prices, decisions)
    return Coverage(len(nodes), sum(declared.values()), len(counts), len(declared), undeclared=missing)


def undeclared_ops(program: Program, prices: Prices, decisions: Decisions | None = None) -> tuple[Undeclared, ...]:
    """The ops of a program that have no rule, the costliest first."""
    calls: dict[str, list[Node]] = {}
    for node in program.nodes:
        if rule_for(node.op) is None:
            calls.setdefault(node.op, []).append(node)
    if not calls:
        return ()
    made_by = {v: (n, o) for n, node in enumerate(program.nodes) for o, v in enumerate(node.outputs) if v >= 0}
    stored = {item.value: i for i, item in enumerate(program.inputs)}
    whole = replicated(prices.mesh)

    def layout_of(value: int, chosen: Decisions) -> Layout:
        """The layout in which a value is made, through hubs: what a hub gathers it gathers for its readers."""
        if value in stored:
            return chosen.inputs[stored[value]]
        n, output = made_by[value]
        node = program.nodes[n]
        if node.op == HUB:
            return layout_of(node_inputs(node)[0], chosen)
        choice = choice_by_names(site_of(node, program), chosen.choices[n], chosen.mesh)
        return whole if choice is None else choice.outputs[output]

    def gathering(values: Iterable[int]) -> tuple[int, int | None]:
        """(bytes, ns) of making the values whole."""
        if decisions is None:
            return sum(prices.stored_bytes(whole, program.dims[v], program.types[v].dtype) for v in values), None
        size = ns = 0
        for v in values:
            dims, kind = program.dims[v], program.types[v]
            source = layout_of(v, decisions)
            steps = reshard_steps(source, whole, dims, prices.mesh)
            size += sum(step_bytes(s, dims, kind.dtype, prices.mesh) for s in steps if s.kind in COLLECTIVES)
            ns += prices.reshard_ns(source, whole, dims, kind)
        return size, ns

    found = []
    for op, nodes in calls.items():
        size = ns = work = 0
        for node in nodes:
            site = site_of(node, program)
            everywhere = JointChoice((), (whole,) * len(site.inputs), (whole,) * len(site.outputs))
            work += prices.op_ns(site, everywhere)
            more, longer = gathering(node_inputs(node))
            size, ns = size + more, ns + (longer or 0)
        places = tuple(dict.fromkeys(filter(None, map(place_of, nodes))))
        line = declaration(nodes[0], program)
        found.append(Undeclared(op, len(nodes), places, work, size, None if decisions is None else ns, line))
    return tuple(sorted(found, key=lambda item: -(item.whole_ns + (item.gather_ns or 0))))


def place_of(node: Node) -> str:
    """``"model.py:12 in forward, in module layers.0"``."""
    return ", in module ".join(part for part in (node.source, node.module) if part)


def rule_name(op: str) -> str:
    """The name that :func:`fxpar.rule` takes: ``"aten.mm.default"`` -> ``"aten::mm"``."""
    namespace, name, overload = op.split(".")
    return f"{namespace}::{name}" + ("" if overload == "default" else f".{overload}")


def declaration(node: Node, program: Program) -> str:
    """A line that declares what is done anyway (nothing splits), for the user to open up dim by dim."""
    if any("List" in str(a.type) and "Tensor" in str(a.type) for a in torch_op(node.op)._schema.arguments):
        return f'fxpar.rule("{rule_name(node.op)}", function_of_the_call)'
    letters = (f"{name}!" for name in "abcdefghijklmnopqrstuvwxyz")
    operands = iter(node_inputs(node))
    sides: list[str] = []
    for argument, given in zip(torch_op(node.op)._schema.arguments, node.args, strict=True):
        if str(argument.type) in ("Tensor", "Optional[Tensor]"):
            rank = len(program.types[next(operands)].shape) if given is not None else 0
            sides.append(" ".join(next(letters, "_") for _ in range(rank)))
    results = [
        " ".join(next(letters, "_") for _ in range(len(program.types[v].shape))) if v >= 0 else "..."
        for v in node.outputs
    ]
    return f'fxpar.rule("{rule_name(node.op)}", "{", ".join(sides)} -> {", ".join(results)}")'


def histogram_coverage(text: str) -> Coverage:
    """Rules of a table of op counts: the first table of a Markdown file, rows ``| `op` | models | count | ...``.

    Returns:
        Coverage; an op counts as covered when it has a rule or capture replaces it before rules are asked. Empty when
        the text has no such table.
    """
    counts = first_table(text)
    replaced, missing = [], []
    covered: Counter[str] = Counter()
    for op, count in counts.items():
        if rule_for(op) is not None:
            covered[op] = count
        elif (how := replacement(op)) is not None:
            covered[op] = count
            replaced.append((op, count, how))
        else:
            known = op.count(".") == 2 and registered(op)
            why = "no rule is declared" if known else "an op of the model's own, not registered here: declare its rule"
            missing.append((op, count, f"{why}; computed whole"))
    return Coverage(
        sum(counts.values()), sum(covered.values()), len(counts), len(covered), tuple(replaced), (), tuple(missing)
    )


def first_table(text: str) -> dict[str, int]:
    """Op -> count of the first Markdown table that has such rows."""
    counts: dict[str, int] = {}
    for line in text.splitlines():
        row = _ROW.match(line)
        if row is not None:
            counts[row[1]] = counts.get(row[1], 0) + int(row[2])
        elif counts and not line.startswith("|"):
            break
    return counts
