"""What a plan would cost if it kept one logical dim whole: the reason, in numbers, for splitting it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fxpar.formulate import Formulation, NodeFilter, formulate
from fxpar.memory_units import unit_for
from fxpar.often import in_time_of
from fxpar.plans.errors import Infeasible
from fxpar.plans.plan import Decisions, Prediction
from fxpar.plans.program import Program
from fxpar.prices import Prices
from fxpar.progress import Progress
from fxpar.rules.choices import JointChoice, Site
from fxpar.simulate import OptimizerBytes, simulate
from fxpar.solver.solve import solve
from fxpar.splits import EXPLAINED, Named, cut_factors, keeps_whole, split_dims

GAP = 0.03
"""How near the best an alternative is looked for: it is shown beside the plan, not run."""
ROUNDS = 2
"""Solved again with a smaller budget this often when the simulator finds more memory in use than the problem knows."""


def alternatives(
    program: Program, decisions: Decisions, named: Named, prices: Prices, budget_bytes: int,
    optimizer_bytes: OptimizerBytes, progress: Progress,
) -> list[tuple[str, Decisions]]:
    """For each dim of :data:`EXPLAINED` that the decisions split, the best plan found on the same mesh that does not.

    It recomputes what the decisions recompute. The node choices are solved again within the memory, or, where nothing
    fits, without a limit.
    """
    split = {found.name for found in split_dims(program, decisions, named)}
    result = []
    for name in EXPLAINED:
        if name not in split:
            continue
        with progress(f"the same with {name} whole"):
            found = _solved(program, decisions, _keeping(name, named), prices, budget_bytes, optimizer_bytes)
        if found is not None and name not in {s.name for s in split_dims(program, found[0], named)}:
            result.append((keeps_whole(name), found[0]))
    return result


def _keeping(name: str, named: Named) -> NodeFilter:
    """Choices that split no loop called ``name``; all of them where nothing else is offered."""

    def kept(index: int, site: Site, choices: Sequence[JointChoice]) -> Sequence[JointChoice]:
        numbers = named.classes.of_factor[index]
        loops = {factor for factor, number in enumerate(numbers) if named.names[number] == name}
        if not loops:
            return choices
        return [c for c in choices if loops.isdisjoint(f for text in c.names for f in cut_factors(text))] or choices

    return kept


def _solved(
    program: Program, decisions: Decisions, keep: NodeFilter, prices: Prices, budget_bytes: int,
    optimizer_bytes: OptimizerBytes,
) -> tuple[Decisions, Prediction] | None:
    try:
        formulation = formulate(
            program, decisions.mesh, prices, budget_bytes=budget_bytes, optimizer_bytes=optimizer_bytes,
            recompute=decisions.recompute, reuse="free", node_filter=keep, unit=unit_for(budget_bytes),
            in_time=in_time_of(decisions),
        )
    except Infeasible:
        return None
    found: tuple[Decisions, Prediction] | None = None
    budget = budget_bytes
    for _ in range(ROUNDS):
        tried = _once(formulation, budget, prices, optimizer_bytes)
        if tried is None:
            break
        found = tried
        excess = found[1].peak_bytes - budget_bytes
        budget -= excess + excess // 8
        if excess <= 0 or budget <= 0:
            break
    return found or _once(formulation, None, prices, optimizer_bytes)


def _once(
    formulation: Formulation, budget: int | None, prices: Prices, optimizer_bytes: OptimizerBytes
) -> tuple[Decisions, Prediction] | None:
    limit = None if budget is None else budget // formulation.unit
    solution = solve(replace(formulation.problem, budget=limit), gap=GAP)
    if solution.assignment is None:
        return None
    decisions = formulation.decisions(solution.assignment)
    return decisions, simulate(formulation.program, decisions, prices, optimizer_bytes)
