"""Ops and inputs of a program by what a user calls them."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from fnmatch import fnmatchcase

from fxpar.plans.errors import FxparError
from fxpar.plans.program import Program


@dataclass(frozen=True)
class Found:
    """One op (``node``) or program input, by its index; ``title``: for people; ``late``: it runs in backward."""

    node: bool
    index: int
    title: str
    late: bool = False


def find(program: Program, pattern: str) -> tuple[Found, ...]:
    """What a pattern names: an op's index, else inputs by name, else ops by module path, else ops by their name.

    Args:
        pattern: ``"12"``, ``"layers.*.up.weight"``, ``"layers.0.up"``, ``"aten.mm.default"`` or ``"mm"``.

    Raises:
        FxparError: nothing matches; names near ones.
    """
    if pattern.isascii() and pattern.isdigit():
        if int(pattern) < len(program.nodes):
            return (_node(program, int(pattern)),)
        last = len(program.nodes) - 1
        raise FxparError(f"there is no op {pattern[:20]}", numbers=f"ops are numbered from 0 to {last}",
                         way_out="fxpar show --full lists them in order")
    inputs = [i for i, item in enumerate(program.inputs)
              if any(fnmatchcase(name, pattern) for name in (item.name, *item.ties))]
    if inputs:
        return tuple(Found(False, i, f"{program.inputs[i].kind} {program.inputs[i].name}") for i in inputs)
    nodes = range(len(program.nodes))
    found = [n for n in nodes if program.nodes[n].module and fnmatchcase(program.nodes[n].module, pattern)]
    found = found or [n for n in nodes if pattern in op_names(program.nodes[n].op)]
    if not found:
        raise FxparError(f"no op or parameter is called {pattern!r}", numbers=near(program, pattern),
                         way_out="give a module path or parameter name (with * for any part), an op, or an op's index; "
                                 "fxpar show --full lists them")
    return tuple(_node(program, n) for n in found)


def near(program: Program, pattern: str) -> tuple[str, ...]:
    """One line of names close to the pattern, none when there are none."""
    known = {i.name for i in program.inputs} | {n.module for n in program.nodes}
    known |= {name for n in program.nodes for name in op_names(n.op)}
    names = sorted(known - {""})
    close = difflib.get_close_matches(pattern, names, n=5, cutoff=0.5)
    close += [name for name in names if pattern and pattern in name and name not in close][: 5 - len(close)]
    return (f"near: {', '.join(close)}",) if close else ()


def op_names(op: str) -> tuple[str, ...]:
    """What an op may be called: ``"aten.mm.default"``, ``"aten.mm"``, ``"mm"``."""
    parts = op.split(".")
    return op, ".".join(parts[:2]), parts[1] if len(parts) > 1 else op


def _node(program: Program, index: int) -> Found:
    node = program.nodes[index]
    where = f" in {node.module}" if node.module else ""
    return Found(True, index, f"op {index} {node.op}{where}, {node.phase}", node.phase == "backward")
