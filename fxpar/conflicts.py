"""Why nothing meets a request: a smallest set of its constraints that conflict.

Constraints are ``--zero``, every ``--pin``, every named mesh axis, ``--recompute on|off`` and the memory budget. A part
of them can be met when the search finds a plan that fits (looked for coarsely: any plan will do). The set named is
minimal: dropping any one of its members leaves a request with a plan, which is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fxpar.candidates import Found, Request, manual_roles
from fxpar.constraints import UNCONSTRAINED, Constraints
from fxpar.minimal_set import minimal_set
from fxpar.plans.errors import Infeasible
from fxpar.plans.mesh import Mesh
from fxpar.restrict import roles_of
from fxpar.search import Search
from fxpar.show import gib, ms

COARSE = 0.1
"""Gap to which a plan is looked for when any will do."""
NO_LIMIT = 2**62
"""Bytes that every plan fits in."""


@dataclass(frozen=True)
class Member:
    """One constraint of a request: ``number`` says which pin or which axis (of the axis' ``name``) it is."""

    kind: Literal["zero", "pin", "axis", "recompute", "memory"]
    text: str
    number: int = 0
    name: str = ""


def members_of(request: Request, meshes: Sequence[Mesh]) -> tuple[Member, ...]:
    """The constraints of a request, those first that are dropped first where several sets conflict: without the memory
    budget the rest is quickly judged."""
    constraints = request.constraints
    axes = {axis.name: axis for mesh in meshes for axis, role in zip(mesh.axes, roles_of(mesh), strict=True) if role}
    result = [Member("memory", f"--memory {gib(request.budget_bytes)}")]
    result += [Member("pin", f"--pin '{pin.text}'", number) for number, pin in enumerate(constraints.pins)]
    result += [Member("axis", f"--mesh {axis.name}={axis.size}", name=axis.name) for axis in axes.values()]
    if request.recompute != "auto":
        result.append(Member("recompute", f"--recompute {request.recompute}"))
    if constraints.zero is not None:
        result.append(Member("zero", f"--zero {constraints.zero}"))
    return tuple(result)


class Conflicts:
    """Which parts of a request's constraints can be met; every part is tried once."""

    def __init__(self, request: Request, meshes: Sequence[Mesh]) -> None:
        self.request = request
        self.meshes = meshes
        self.members = members_of(request, meshes)
        self._search = Search(request)
        self._plans: dict[tuple[Member, ...], Found | None] = {}
        self._manual: dict[tuple[Mesh, int, str], list[Found]] = {}

    def plan(self, members: Sequence[Member]) -> Found | None:
        """Some plan that fits and obeys these constraints and no others; None when none is found."""
        key = tuple(members)
        if key not in self._plans:
            # what obeys more obeys these
            known = [f for more, f in self._plans.items() if f is not None and set(more) >= set(key)]
            found = (f for mesh in self.meshes if (f := self._on(mesh, key)) is not None)
            self._plans[key] = known[0] if known else next(found, None)
        return self._plans[key]

    def smallest(self) -> tuple[Member, ...]:
        """A minimal set that conflicts; empty when all of them together can be met after all."""
        if self.plan(self.members) is not None:
            return ()
        if self.plan(self.members[:1]) is None:
            return self.members[:1]
        return minimal_set(self.members, lambda part: self.plan(part) is not None)

    def _asked(self, members: Sequence[Member]) -> Request:
        """The request with these constraints only."""
        request, kinds = self.request, {m.kind for m in members}
        pins = tuple(request.constraints.pins[m.number] for m in members if m.kind == "pin")
        return replace(
            request, gap=max(request.gap, COARSE), hints=(),
            constraints=Constraints(request.constraints.zero if "zero" in kinds else None, pins),
            recompute=request.recompute if "recompute" in kinds else "auto",
            budget_bytes=request.budget_bytes if "memory" in kinds else NO_LIMIT,
        )

    def _on(self, mesh: Mesh, members: Sequence[Member]) -> Found | None:
        search = self._search.asking(self._asked(members))
        named = {m.name for m in members if m.kind == "axis"}
        roles = tuple(r if a.name in named else "" for a, r in zip(mesh.axes, roles_of(mesh), strict=True))
        try:
            found = search.best(mesh, roles, list)
        except Infeasible:
            return None  # some op or input is left no choice
        if found is not None and found.fits:
            return found
        applied = search.applied(mesh)
        for candidate in self._hand_made(mesh, search.request):
            made = next(of for name, of, _ in manual_roles(mesh) if name == candidate.name)
            kept = all(asked in ("", role) for asked, role in zip(roles, made, strict=True))
            if candidate.fits and kept and (applied is None or applied.obeyed(candidate.decisions)):
                return candidate
        return None

    def _hand_made(self, mesh: Mesh, request: Request) -> list[Found]:
        key = (mesh, request.budget_bytes, request.recompute)
        if key not in self._manual:
            alone = self._search.asking(replace(request, constraints=UNCONSTRAINED))
            self._manual[key] = alone.manual(mesh)
        return self._manual[key]


def explained(error: Infeasible, request: Request, meshes: Sequence[Mesh]) -> Infeasible:
    """The error of a search that found nothing, with the constraints that conflict where there are several.

    Returns ``error`` itself when the memory budget alone rules everything out, or named axes with it do.
    """
    if not request.constraints and request.recompute == "auto":
        return error
    with request.progress("looking for the constraints that conflict"):
        conflicts = Conflicts(request, meshes)
        found = conflicts.smallest()
    if not found or {m.kind for m in found} <= {"axis", "memory"}:
        return error
    numbers = []
    for member in found:
        rest = conflicts.plan([m for m in found if m is not member])
        if rest is not None:
            p = rest.prediction
            numbers.append(f"without {member.text} there is one: {ms(p.step_ns)}, {gib(p.peak_bytes)} per device")
    several = len(found) > 1
    return Infeasible(
        f"no plan obeys {' and '.join(m.text for m in found)}", where=f"mesh {' or '.join(map(str, meshes))}",
        numbers=numbers, way_out=f"drop or loosen {'any one of them' if several else 'it'}; none of the "
        f"{len(found)} can be spared from this conflict" if several else "drop or loosen it",
    )
