"""What every local program must obey, checked between passes, and the hash that shows two ranks agree.

``check(local)`` raises :class:`IllegalProgram` with every violation; a violation is a defect of a pass or a damaged
plan, never something the user's model did.
"""

from __future__ import annotations

import hashlib
from math import prod

from fxpar.plans.errors import FxparError
from fxpar.plans.program import refs
from fxpar.runtime.local import (
    AddStep,
    AnyStep,
    CollectiveStep,
    Cut,
    Geometry,
    Halo,
    LocalProgram,
    LocalStep,
    OpStep,
    Swap,
    WaitStep,
    collectives,
)


class IllegalProgram(FxparError):
    """A local program breaks its rules; ``numbers`` holds every violation."""


def check(local: LocalProgram) -> LocalProgram:
    """``local`` itself when it is legal.

    Checked: every value is defined once and before it is read, no forward step reads what backward defines, args name
    only the step's operands, waits name all results of a collective, and the shapes before and after every collective
    and local step fit its geometry.

    Raises:
        IllegalProgram: with all violations.
    """
    found: list[str] = []
    defined: dict[int, str] = {v: "forward" for v in local.inputs}
    issued: set[tuple[int, ...]] = set()
    for index, step in enumerate(local.steps):
        for value in step.reads:
            if value not in defined:
                found.append(f"step {index} reads value {value} before it is defined")
            elif step.phase == "forward" and defined[value] == "backward":
                found.append(f"step {index} of forward reads value {value} of backward")
        if isinstance(step, OpStep):
            strangers = {v for arg in step.args for v in refs(arg)} - set(step.operands)
            if strangers:
                found.append(f"step {index} ({step.op}) uses values {sorted(strangers)} that are not its operands")
        elif isinstance(step, AddStep):
            if len({local.types[v] for v in (*step.reads, *step.writes)}) > 1:
                found.append(f"step {index} adds a value to a total of another type")
        elif isinstance(step, WaitStep):
            if step.values not in issued:
                found.append(f"step {index} waits for values {step.values}, which no collective makes together")
        else:
            found += [f"step {index} ({step.kind}): {text}" for text in _shapes(step, local)]
        for value in step.writes:
            if value in defined:
                found.append(f"step {index} defines value {value} again")
            defined[value] = step.phase
        if isinstance(step, CollectiveStep):
            issued.add(step.outputs)
    undefined = [v for v in local.outputs if v not in defined]
    found += [f"value {v} leaves, but no step defines it" for v in undefined]
    if found:
        raise IllegalProgram(f"the local program of rank {local.coords} is not legal", numbers=found)
    return local


def _shapes(step: CollectiveStep | LocalStep, local: LocalProgram) -> list[str]:
    def size(value: int) -> int:
        return prod(local.types[value].shape)

    if isinstance(step, LocalStep):
        if step.kind == "slice":
            want = step.outer * step.length * step.inner
            return [] if size(step.output) == want else [f"keeps {want} elements for a result of {size(step.output)}"]
        same = local.types[step.value] == local.types[step.output]
        return [] if same else ["changes the shape"]
    found = []
    if any(local.types[v].dtype != step.dtype for v in (*step.values, *step.outputs)):
        found.append(f"a value is not {step.dtype}")
    count = 0 if step.kind == "all_reduce" else len(step.values)
    if len(step.values) != len(step.outputs) or len(step.geometries) != count:
        counts = len(step.values), len(step.outputs), len(step.geometries)
        return [*found, f"has {counts} values, results and geometries"]
    if step.kind == "all_reduce":
        if any(local.types[a] != local.types[b] for a, b in zip(step.values, step.outputs, strict=True)):
            found.append("changes a shape")
        return found
    for before, after, geometry in zip(step.values, step.outputs, step.geometries, strict=True):
        found += _fit(step, geometry, local.coords[step.axis], size(before), size(after))
    return found


def _fit(step: CollectiveStep, geometry: Geometry, me: int, before: int, after: int) -> list[str]:
    found = []
    match geometry:
        case Cut(outer, lengths, inner):
            whole, piece = (after, before) if step.kind == "all_gather" else (before, after)
            if whole != outer * sum(lengths) * inner or piece != outer * lengths[me] * inner:
                found.append(f"[{outer}, {lengths}, {inner}] does not fit {whole} and {piece} elements")
        case Halo() as halo:
            piece = halo.outer * halo.lengths[me] * halo.inner
            window = halo.outer * (halo.ends[me] - halo.starts[me]) * halo.inner
            if (before, after) != ((window, piece) if step.kind == "halo_sum" else (piece, window)):
                found.append(f"{halo} does not fit {before} elements before and {after} after")
        case Swap() as swap:
            rest = swap.outer * swap.middle * swap.inner
            if before != rest * swap.joined[me] * sum(swap.cut):
                found.append(f"{swap} does not fit {before} elements before")
            if after != rest * sum(swap.joined) * swap.cut[me]:
                found.append(f"{swap} does not fit {after} elements after")
    return found


def collective_signature(local: LocalProgram) -> str:
    """Hash of the sequence of collectives (kind, axis, reduction, dtype, size, phase): equal on all ranks, or the
    ranks would wait for each other forever."""
    text = "\n".join(
        f"{c.phase} {c.kind} {c.axis} {c.reduce} {c.dtype} {len(c.values)} {c.elements}" for c in collectives(local)
    )
    return hashlib.sha256(f"{local.mesh}\n{text}".encode()).hexdigest()


def structure(local: LocalProgram) -> tuple[tuple[object, ...], ...]:
    """What of every step must not depend on the rank (args and lengths may)."""

    def row(step: AnyStep) -> tuple[object, ...]:
        if isinstance(step, OpStep):
            return (step.node, step.phase, step.operands, step.outputs, step.recomputed)
        if isinstance(step, LocalStep):
            return (step.kind, step.axis, step.phase, step.value, step.output)
        if isinstance(step, AddStep):
            return ("add", step.phase, step.total, step.value, step.output)
        if isinstance(step, WaitStep):
            return ("wait", step.phase, step.values)
        return (step.kind, step.axis, step.reduce, step.values, step.outputs, step.elements, step.dtype, step.phase)

    return tuple(row(step) for step in local.steps)
