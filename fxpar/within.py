"""The fastest plan within the memory: the solver's memory row, corrected until the simulator is content.

The problem's memory row is not what the simulator counts: it knows no temporaries, takes all gradients as there from
the start, and rounds up. Temporaries that are live at the peak of a plan which does not fit enter the row; what
difference is left corrects the budget.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from fxpar.candidates import Found, rank
from fxpar.formulate import Formulation, with_temporaries
from fxpar.modes import DROPPED, pinned_modes
from fxpar.plans.lifetimes import hub_partners
from fxpar.plans.program import Program, node_inputs
from fxpar.prices import Prices
from fxpar.solver.solution import Solution
from fxpar.solver.warm import Start

# solved again with another budget at most this often
ROUNDS = 5
# times the gap asked for: how near the best a plan is looked for that is only compared (made by hand), or that first
# shows which values are live at the peak
EXPLORED = 3
# a plan made by hand whose memory row alone needs this many times what there is will not fit
HOPELESS = 2

Attempt = Callable[[Formulation, Sequence[Found], Start | None, int], tuple[Found | None, Solution]]
"""(problem, plans to begin with, earlier messages, times the gap asked for) -> what the solver finds, simulated."""


class Within:
    """One search for the fastest plan within the memory; :meth:`run` finds it.

    Args:
        attempt: solves a problem.
        formulation: the problem; its budget is set here.
        limit: bytes per device.
        gap: how near the best the plan shall be.
        own: whether the plan may be chosen as the solver's; those made by hand are looked for with less care.
        starts: plans to begin with; the first is the fastest without a limit, which does not fit.
    """

    def __init__(
        self, attempt: Attempt, formulation: Formulation, prices: Prices, *, limit: int, gap: float, own: bool,
        starts: Sequence[Found],
    ) -> None:
        self.attempt, self.prices, self.limit, self.gap, self.own = attempt, prices, limit, gap, own
        self.candidates = list(starts)
        # what lives at the peak of the plan without a limit is the best guess of what will with one
        self.charged = temporaries(formulation, starts[0], None)
        self.formulation = with_temporaries(formulation, prices, sorted(self.charged.elements()))
        self.budget = limit
        self.loosened = False
        self.smallest_tried = -1  # with how many temporaries charged
        self.begin: Start | None = None

    def run(self) -> Found | None:
        """The fastest plan that the simulator finds to fit, or the smallest found; None without any."""
        best: Found | None = None
        for number in range(ROUNDS):
            found, solution = self.solved(first=number == 0)
            if found is None or solution.assignment is None:
                if not self.relax(solution):
                    break
                continue
            best = found if best is None or rank(found) < rank(best) else best
            self.candidates.append(found)
            going_on = self.loosen(found, solution) if found.fits else self.tighten(found, solution.assignment)
            if not going_on:
                break
        return best

    def solved(self, first: bool) -> tuple[Found | None, Solution]:
        """The best within the budget of now: near it at first, and nearer where that fits already."""
        unit = self.formulation.unit
        self.formulation = replace(
            self.formulation, problem=replace(self.formulation.problem, budget=self.budget // unit)
        )
        found, solution = self._attempt(EXPLORED if first or not self.own else 1)
        if self.own and first and found is not None and found.fits and found.certificate.gap > self.gap:
            self.candidates.append(found)
            nearer, solution = self._attempt(1)
            found = nearer or found
        return found, solution

    def _attempt(self, times: int) -> tuple[Found | None, Solution]:
        found, solution = self.attempt(self.formulation, self.candidates, self.begin, times)
        self.begin = solution.start or self.begin
        return found, solution

    def relax(self, solution: Solution) -> bool:
        """Where no assignment is within the row, which may count more than the simulator: a budget a little above the
        smallest (the smallest itself buys its last bytes at any price). False: nothing more to try."""
        if self.smallest_tried == self.charged.total() or solution.min_memory is None:
            return False
        smallest = solution.min_memory * self.formulation.unit
        if not self.own and smallest > HOPELESS * self.limit:
            return False
        self.budget, self.smallest_tried = smallest * 9 // 8, self.charged.total()
        return True

    def loosen(self, found: Found, solution: Solution) -> bool:
        """Once, where a plan that fits leaves room that may buy time: the budget with that room. False: it is not
        worth it."""
        beyond = found.prediction.peak_bytes - found.counted
        worth = solution.multiplier * ((self.limit - beyond - self.budget) // self.formulation.unit)
        if not self.own or self.loosened or worth <= self.gap * found.certificate.cost_ns:
            return False
        self.budget, self.loosened = self.limit - beyond, True
        return True

    def tighten(self, found: Found, assignment: Sequence[int]) -> bool:
        """After a plan that does not fit: its temporaries in the row, and a budget smaller by what the row does not
        know. False: nothing is left of the budget."""
        more = temporaries(self.formulation, found, assignment) - self.charged
        self.charged += more
        self.formulation = with_temporaries(self.formulation, self.prices, sorted(more.elements()))
        unit = self.formulation.unit
        counted = self.formulation.problem.memory(assignment) * unit
        over = found.prediction.peak_bytes - self.limit
        self.budget = self.limit - (found.prediction.peak_bytes - counted)
        if not more:
            self.budget = min(self.budget, found.counted - unit) - over // 2
        return self.budget > 0


def temporaries(formulation: Formulation, found: Found, assignment: Sequence[int] | None) -> Counter[int]:
    """Values live at the peak of a plan that the memory row does not count as kept or made again. ``assignment``: of
    the plan in the formulation, None when it is not of it."""
    program = formulation.program
    producer = {v: n for n, node in enumerate(program.nodes) for v in node.outputs if v >= 0}
    modes = _modes(program, formulation, found, assignment)
    partners = hub_partners(program)
    # what a kept copy is a copy of: the row counts the copy
    held = {v for b in found.decisions.reuse for v in node_inputs(program.nodes[partners[b]])}
    return Counter(
        v for v in found.at_peak
        if v in producer and v not in held
        and (program.nodes[producer[v]].phase == "backward" or modes[producer[v]] == DROPPED)
    )


def _modes(
    program: Program, formulation: Formulation, found: Found, assignment: Sequence[int] | None
) -> Sequence[int]:
    """Per node what becomes of its results."""
    if formulation.modes and assignment is not None:
        return [formulation.modes[c][assignment[c]] for c in formulation.classes.nodes]
    return pinned_modes(program, found.decisions.recompute, found.decisions.reuse)[0]
