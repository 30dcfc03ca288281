"""``fxpar explain PLAN NODE``: what else one op or parameter could have done, and what that would cost.

In: a plan and a name. Out: per group of repeated layers that the name stands for, its alternatives: the price here
(its own cost and the reshards to its neighbours, the rest of the plan as it is) and what the whole plan would cost with
the alternative forced and all else decided again. All from the plan file: program, mesh, rates and question are in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fxpar.formulate import Formulation
from fxpar.plan_names import Found, find
from fxpar.plans.errors import FxparError
from fxpar.plans.plan import Plan
from fxpar.priced_problem import formulate_again
from fxpar.progress import Progress, silent
from fxpar.show import gib, ms, table
from fxpar.solver.certificate import checkable_graph
from fxpar.solver.problem import FORBIDDEN, Problem
from fxpar.solver.solve import solve
from fxpar.splits import named_dims
from fxpar.state_words import state_words

SHOWN = 6
"""Alternatives that are priced with the whole plan solved again: the cheapest here."""
GROUPS = 1
"""Groups explained when a name stands for several: forward ops first, and of them those with the most time."""
EFFORT = 2
GAP = 0.002


@dataclass(frozen=True)
class Alternative:
    """One state of a group of tied ops or inputs.

    ``here_ns``: own cost and reshards, the rest of the plan as it is; None where it cannot stand beside it. ``plan_ns``
    and ``bound_ns``: the cheapest plan found with it, and what no plan with it can be below; None where not solved, or
    (``possible`` False) nothing fits. ``memory_bytes``: beyond the chosen state, per device.
    """

    words: str
    chosen: bool
    own_ns: int
    reshard_ns: int | None
    memory_bytes: int
    plan_ns: int | None = None
    bound_ns: int | None = None
    possible: bool = True

    @property
    def here_ns(self) -> int | None:
        return None if self.reshard_ns is None else self.own_ns + self.reshard_ns


@dataclass(frozen=True)
class Group:
    """What a name stands for, once: ``members`` tied ops or inputs, and their ``states`` in all."""

    title: str
    members: int
    states: int
    alternatives: tuple[Alternative, ...]


@dataclass(frozen=True)
class Explanation:
    """The answer of ``fxpar explain``; ``cost_ns``: of the plan, in its priced problem; ``more``: groups left out."""

    pattern: str
    cost_ns: int
    groups: tuple[Group, ...]
    more: tuple[str, ...]

    def text(self) -> str:
        """For people."""
        lines = [f"the plan costs {ms(self.cost_ns)} in its priced problem (simulated)"]
        for group in self.groups:
            times = f", {group.members} in all, decided together" if group.members > 1 else ""
            lines += ["", f"{group.title}{times}"]
            head = ("", "ops", "reshards", "here", "memory", "whole plan with it", "")
            lines += table([head, *(self._row(a, group) for a in group.alternatives)])
            left = group.states - len(group.alternatives)
            lines += [f"  and {left} more that cost more here"] if left else []
        if self.more:
            lines += ["", f"{len(self.more)} more of that name (an index explains one):"]
            lines += [f"  {title}" for title in self.more[:12]]
            lines += [f"  and {len(self.more) - 12} more"] if len(self.more) > 12 else []
        return "\n".join(lines)

    def _row(self, a: Alternative, group: Group) -> tuple[str, ...]:
        now = next((x for x in group.alternatives if x.chosen), None)
        here = "-"
        if a.here_ns is not None and now is not None and now.here_ns is not None:
            more = a.here_ns - now.here_ns
            here = ms(a.here_ns) if a.chosen else f"{'+' if more >= 0 else ''}{ms(more)}"
        if a.chosen:
            whole = ms(self.cost_ns)
        elif not a.possible:
            whole = "impossible"
        elif a.plan_ns is None:
            whole = "not found" if a.bound_ns is not None else "-"
        else:
            whole = f"{ms(a.plan_ns)} ({(a.plan_ns - self.cost_ns) / max(self.cost_ns, 1):+.2%})"
        memory = "" if not a.memory_bytes else f"{'+' if a.memory_bytes > 0 else '-'}{gib(abs(a.memory_bytes))}"
        reshards = "cannot stand" if a.reshard_ns is None else ms(a.reshard_ns)
        return "chosen" if a.chosen else "", ms(a.own_ns), reshards, here, memory, whole, a.words

    def as_dict(self) -> dict[str, Any]:
        """Plain data; ns and bytes."""
        return {
            "pattern": self.pattern, "cost_ns": self.cost_ns, "more": list(self.more),
            "groups": [
                {
                    "name": g.title, "members": g.members, "states": g.states,
                    "alternatives": [
                        {"what": a.words, "chosen": a.chosen, "own_ns": a.own_ns, "reshard_ns": a.reshard_ns,
                         "here_ns": a.here_ns, "memory_bytes": a.memory_bytes, "plan_ns": a.plan_ns,
                         "plan_bound_ns": a.bound_ns, "possible": a.possible}
                        for a in g.alternatives
                    ],
                }
                for g in self.groups
            ],
        }


def explain(plan: Plan, pattern: str, *, shown: int = SHOWN, progress: Progress = silent) -> Explanation:
    """Explain what an op or input of the plan decides.

    Args:
        pattern: a module path or input name (``*`` and ``?`` as in file names), an op, or the index of an op.
        shown: alternatives solved again, per group.

    Raises:
        FxparError: nothing of that name; the plan does not say which problem it answers, or its decisions are not
            among those of that problem.
    """
    found = find(plan.program, pattern)
    with progress("formulating the problem"):
        made = formulate_again(plan)
        if made is None:
            raise FxparError(
                "the plan does not say which problem it answers",
                numbers=f"certificate: {plan.certificate.status}, without a question",
                way_out="compile it again: plans of older versions and of --random-choices hold none",
            )
        formulation = made[0]
    assignment = formulation.assignment(plan.decisions)
    cost = None if assignment is None else formulation.problem.cost(assignment)
    if assignment is None or cost is None:
        raise FxparError(
            "the plan's decisions are not among those of its problem", numbers="fxpar check --certificate says more",
            way_out="compile the plan again with this fxpar",
        )
    groups: dict[int, Found] = {}
    for each in found:
        numbers = formulation.classes.nodes if each.node else formulation.classes.inputs
        groups.setdefault(numbers[each.index], each)
    problem = formulation.problem
    order = sorted(groups, key=lambda c: (
        groups[c].late, -int(problem.variables[c].costs[assignment[c]]), groups[c].index
    ))
    batch_dim = plan.certificate.question.batch_dim if plan.certificate.question is not None else None
    words = state_words(formulation, named_dims(plan.program, batch_dim))
    explained = []
    for c in order[:GROUPS]:
        with progress(f"solving again with {groups[c].title}"):
            states = alternatives(formulation, assignment, c, words(c), shown)
        explained.append(Group(groups[c].title, formulation.classes.sizes[c], problem.variables[c].states, states))
    return Explanation(pattern, cost, tuple(explained), tuple(groups[c].title for c in order[GROUPS:]))


def alternatives(
    formulation: Formulation, assignment: Sequence[int], c: int, words: Sequence[str], shown: int
) -> tuple[Alternative, ...]:
    """The chosen state of class ``c`` and its cheapest others, these with the whole plan solved again."""
    problem = formulation.problem
    variable, now = problem.variables[c], assignment[c]
    here, reshards = prices_here(problem, assignment, c)
    order = sorted(range(variable.states), key=lambda s: (here[s] is None, here[s] or int(variable.costs[s]), s))
    others: list[int] = []
    for s in order:
        if s != now and len(others) < shown and (here[s] is not None or _may_stand(problem, c, s)):
            others.append(s)
    result = []
    for s in (now, *others):
        memory = (int(variable.memory[s]) - int(variable.memory[now])) * formulation.unit
        own = Alternative(words[s], s == now, int(variable.costs[s]), reshards[s], memory)
        result.append(own if s == now else _solved(problem, assignment, c, s, own))
    return tuple(result)


def prices_here(
    problem: Problem, assignment: Sequence[int], c: int
) -> tuple[list[int | None], list[int | None]]:
    """Per state of variable ``c``, the rest assigned: own cost plus pairs, and the pairs alone; None: forbidden."""
    variable = problem.variables[c]
    pairs = np.zeros(variable.states, np.int64)
    barred = variable.costs >= FORBIDDEN
    for edge in problem.edges:
        if c in (edge.u, edge.v):
            values = problem.tables[edge.table]
            row = values[:, assignment[edge.v]] if edge.u == c else values[assignment[edge.u]]
            barred = barred | (row >= FORBIDDEN)
            pairs = pairs + edge.weight * np.where(row >= FORBIDDEN, 0, row)
    alone = [None if b else int(p) for b, p in zip(barred, pairs, strict=True)]
    return [None if p is None else p + int(o) for p, o in zip(alone, variable.costs, strict=True)], alone


def _solved(problem: Problem, assignment: Sequence[int], c: int, state: int, known: Alternative) -> Alternative:
    """The cheapest plan with variable ``c`` in ``state``."""
    start = [state if v == c else s for v, s in enumerate(assignment)]
    solution = solve(_forced(problem, c, state), gap=GAP, candidates=[start], effort=EFFORT)
    if solution.status.value == "infeasible":
        return replace(known, possible=False)
    return replace(known, plan_ns=solution.cost, bound_ns=solution.bound)


def _forced(problem: Problem, c: int, state: int) -> Problem:
    """The problem with variable ``c`` in ``state``."""
    variable = problem.variables[c]
    only = np.full(variable.states, FORBIDDEN)
    only[state] = variable.costs[state]
    variables = (*problem.variables[:c], replace(variable, costs=only), *problem.variables[c + 1 :])
    return replace(problem, variables=variables)


def _may_stand(problem: Problem, c: int, state: int) -> bool:
    """False when forbidden pairs alone rule the state out, whatever the others do."""
    return checkable_graph(_forced(problem, c, state)) is not None
