"""What the pattern of a pin names in a program."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from fnmatch import fnmatchcase

from fxpar.modes import kind_of
from fxpar.plan_names import near, op_names
from fxpar.plans.errors import FxparError
from fxpar.plans.program import Program


@dataclass(frozen=True)
class Matched:
    """Indices of ``inputs``, or of forward ops: those ``computing`` and those that make the ``results``."""

    inputs: tuple[int, ...] = ()
    computing: tuple[int, ...] = ()
    results: tuple[int, ...] = ()


def matched(program: Program, pattern: str) -> Matched:
    """What a pattern names: parameters, buffers and inputs, else modules by path, else ops by name.

    ``PATH/OP`` are the ops of that name in modules of that path, ``PATH/`` the modules even where inputs match. Of a
    module the ops that compute are those that are no views (unless all are), and the result is its last op's.

    Raises:
        FxparError: nothing matches; names near ones.
    """
    path, slash, op = pattern.rpartition("/")
    if not slash:
        path, op = "", pattern
        inputs = tuple(
            i for i, item in enumerate(program.inputs) if item.kind in ("parameter", "buffer", "input")
            and any(fnmatchcase(name, pattern) for name in (item.name, *item.ties))
        )
        if inputs:
            return Matched(inputs)
    forward = [n for n, node in enumerate(program.nodes) if node.phase == "forward" and kind_of(node) != "hub"]
    if not slash or not op:
        modules: dict[str, list[int]] = defaultdict(list)
        for n in forward:
            module = _within(program, n, path or pattern)
            if module is not None:
                modules[module].append(n)
        if modules:
            nodes = [n for members in modules.values() for n in members]
            computing = [n for n in nodes if kind_of(program.nodes[n]) == "op"]
            return Matched((), tuple(computing or nodes), tuple(members[-1] for members in modules.values()))
    found = tuple(
        n for n in forward if op and any(fnmatchcase(name, op) for name in op_names(program.nodes[n].op))
        and (not path or _within(program, n, path) is not None)
    )
    if not found:
        raise FxparError(
            f"no parameter, input, module or forward op is called {pattern!r}", where="--pin",
            numbers=near(program, op or path),
            way_out="give a parameter or module path (with * for any part), an op, or PATH/OP; fxpar show --full "
                    "lists them",
        )
    return Matched((), found, found)


def _within(program: Program, node: int, pattern: str) -> str | None:
    """The outermost module around a node whose path matches."""
    parts = program.nodes[node].module.split(".")
    paths = (".".join(parts[: length + 1]) for length in range(len(parts)))
    return next((path for path in paths if path and fnmatchcase(path, pattern)), None)
