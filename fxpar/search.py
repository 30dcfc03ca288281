"""Which plan: the solver's on every mesh considered, beside the plans people make by hand.

Each candidate is rewritten and simulated; the fastest that fits the memory wins, so the chosen plan is never worse
than plain data parallel, ZeRO-3 or Megatron tensor parallel under the same cost model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

import msgspec

from fxpar.beside import beside
from fxpar.candidates import Found, Request, manual_roles, rank, smaller, too_large
from fxpar.certify import certify, question_of
from fxpar.constraints import UNCONSTRAINED, Applied, apply, filters
from fxpar.exposure import Exposed, exposed, repriced
from fxpar.formulate import Formulation, formulate
from fxpar.memory_units import unit_for
from fxpar.modes import Reuse
from fxpar.names import batch_class, classes_of, names_of
from fxpar.often import ALONE, InTime, in_time_of, made_by_hand, ways_in_time
from fxpar.plans.mesh import Mesh
from fxpar.plans.plan import Candidate, Certificate, Decisions
from fxpar.progress import silent
from fxpar.recompute import recompute_nodes
from fxpar.restrict import Restriction, roles_of, weight_operands, weight_values
from fxpar.simulate import replay
from fxpar.solver.solution import Solution
from fxpar.solver.solve import solve
from fxpar.solver.warm import Start
from fxpar.splits import Named
from fxpar.within import Within

# rounds of pricing by what a step waits for, and the states of problems that are not priced so: it takes too long
OVERLAP_ROUNDS = 5
MOST_STATES = 30_000
# programs of more nodes are searched in two processes
MANY_NODES = 4000
OWN = "fxpar"
"""The name of the plan that the solver finds when nothing is asked for."""


class Search:
    """Candidates of one request; :meth:`run` finds them all."""

    def __init__(self, request: Request) -> None:
        self.request = request
        program = request.program
        self.classes = classes_of(program)
        self.batch = frozenset(batch_class(program, request.batch_dim))
        self.weights = weight_operands(program)
        self.weight_values = weight_values(program, self.weights)
        self._applied: dict[Mesh, Applied] = {}

    def applied(self, mesh: Mesh) -> Applied | None:
        """The request's constraints on a mesh, None without any."""
        request = self.request
        if request.constraints and mesh not in self._applied:
            named = Named(self.classes, names_of(request.program, self.classes, self.batch))
            self._applied[mesh] = apply(request.constraints, request.program, mesh, named)
        return self._applied[mesh] if request.constraints else None

    def asking(self, request: Request) -> Search:
        """The same search of another request for the same program and batch."""
        other = copy.copy(self)
        other.request, other._applied = request, {}
        return other

    def restriction(self, roles: tuple[str, ...], sharded: bool | None) -> Restriction:
        """Filters for axes in the given roles."""
        classes, batch, program = self.classes, self.batch, self.request.program
        return Restriction(
            program, roles,
            lambda node, factor: classes.of_factor[node][factor] in batch,
            lambda item, dim, atom: classes.of_atom[program.inputs[item].value][dim][atom] in batch,
            self.weights, self.weight_values, sharded,
        )

    def formulate(
        self, mesh: Mesh, roles: tuple[str, ...], sharded: bool | None, budget: int | None,
        recompute: tuple[int, ...] | None, reuse: Reuse = "never", in_time: InTime = ALONE,
    ) -> Formulation:
        """The problem on a mesh with axes in the given roles; ``recompute`` and ``reuse`` as for :func:`formulate`."""
        restriction = self.restriction(roles, sharded) if any(roles) else None
        node_filter, input_filter = filters(restriction, self.applied(mesh))
        return formulate(
            self.request.program, mesh, self.request.prices(mesh), budget_bytes=budget,
            optimizer_bytes=self.request.optimizer_bytes, recompute=recompute, reuse=reuse,
            node_filter=node_filter, input_filter=input_filter, unit=unit_for(self.request.budget_bytes),
            in_time=in_time, in_flight=1 if self.request.flight is None else self.request.flight.microbatches,
        )

    @property
    def reuse(self) -> Reuse:
        """Which copies of parameters the request lets chosen plans keep: ZeRO-3 frees each, ZeRO-1 and -2 keep each."""
        return self.request.constraints.reuse

    @property
    def ways(self) -> tuple[InTime, ...]:
        """What may be done once a step, or by every microbatch."""
        request = self.request
        given = request.in_time
        return (given,) if given is not None else ways_in_time(request.program, request.constraints.zero)

    def found(self, name: str, decisions: Decisions, certificate: Certificate) -> Found:
        """Simulate decisions."""
        request = self.request
        prices = request.prices(decisions.mesh)
        replayed = replay(request.program, decisions, prices, request.optimizer_bytes)
        prediction = replayed.prediction
        if request.flight is not None:
            together = request.flight.bytes_together(replayed)
            prediction = msgspec.structs.replace(prediction, peak_bytes=together)
        return Found(name, decisions, prediction, certificate, prediction.peak_bytes <= request.budget_bytes,
                     at_peak=replayed.at_peak, waited=replayed.waited)

    def manual(self, mesh: Mesh) -> list[Found]:
        """The hand-made plans on a mesh, each with the recomputation with which it fits (if any makes it fit); they are
        made without the constraints, and obey them or not."""
        results = []
        free, applied = self.asking(replace(self.request, constraints=UNCONSTRAINED)), self.applied(mesh)
        for name, roles, sharded in manual_roles(mesh):
            obeys = all(asked in ("", role) for asked, role in zip(roles_of(mesh), roles, strict=True))
            in_time = made_by_hand(self.request.program, sharded)
            found, _ = free._fitting(name, mesh, roles, sharded, list, "never", in_time)
            if found is not None:
                obeys = obeys and (applied is None or applied.obeyed(found.decisions))
                results.append(replace(found, obeys=obeys))
        return results

    def by_hand(self, name: str, mesh: Mesh, roles: tuple[str, ...], zero: int) -> Found | None:
        """The plan of somebody who gives the axes these roles and stores parameters by ZeRO stage ``zero``, with the
        recomputation with which it fits."""
        alone = self.request.program.time is None
        reuse: Reuse = "always" if zero in (1, 2) and alone else "never"
        return self._fitting(name, mesh, roles, zero > 0, list, reuse, self.request.in_time or ALONE)[0]

    def manual_beside(self, mesh: Mesh) -> Callable[[], list[Found]]:
        """:meth:`manual`, begun at once beside what follows where that takes long; without the problems solved."""
        if len(self.request.program.nodes) < MANY_NODES:
            return cache(partial(self.manual, mesh))
        quiet = self.asking(replace(self.request, progress=silent))
        return cache(beside(lambda: [replace(found, formulation=None, start=None) for found in quiet.manual(mesh)]))

    def hinted(self, meshes: Sequence[Mesh]) -> list[Found]:
        """The decisions that the request gives to begin with, simulated. One that is no plan of the problem on its
        mesh (layers that differ, axes or constraints that it does not obey) is shown and never chosen."""
        results = []
        for name, decisions in self.request.hints:
            mesh = next(m for m in meshes if m.sizes == decisions.mesh.sizes)
            decisions = msgspec.structs.replace(decisions, mesh=mesh)
            cut = None if "dp" in roles_of(mesh) else False
            formulation = self.formulate(mesh, roles_of(mesh), cut, None, decisions.recompute, self.reuse,
                                         in_time_of(decisions))
            cost = cost_of(formulation, decisions)
            certificate = Certificate("feasible", cost or 0, 0, 1.0)
            results.append(replace(self.found(name, decisions, certificate), obeys=cost is not None))
        return results

    def best(self, mesh: Mesh, roles: tuple[str, ...], starts: Callable[[], Sequence[Found]]) -> Found | None:
        """The solver's fastest plan on a mesh; parameters cut on dp axes are tried only where memory binds. ``starts``
        gives plans to begin with where memory binds."""
        best: Found | None = None
        freely = self.request.constraints.zero is not None  # it says how parameters are stored, not the axis' name
        for sharded in (None,) if freely else (False, None) if "dp" in roles else (False,):
            binds = False
            for in_time in self.ways:
                found, binds = self._fitting(OWN, mesh, roles, sharded, starts, self.reuse, in_time)
                if found is not None and (best is None or rank(found) < rank(best)):
                    best = replace(found, parameters_cut=sharded)
                if not binds:
                    break
            if not binds:
                break
        return None if best is None else self._overlapping(best)

    def beyond(self, plan: Found, manual: Sequence[Found]) -> Found:
        """The solver's plan, or a faster one of its problem that begins from a plan by hand on the same mesh: one that
        is faster shows that more is hidden than the problem's costs know."""
        formulation = plan.formulation
        faster = [f for f in manual if f.decisions.mesh == plan.decisions.mesh and rank(f) < rank(plan)]
        if formulation is None or not faster:
            return plan
        first = min(faster, key=rank)
        cost = cost_of(formulation, first.decisions)
        if cost is None:
            return plan
        begun = replace(plan, decisions=first.decisions, prediction=first.prediction, fits=first.fits,
                        at_peak=first.at_peak, waited=first.waited,
                        certificate=_held_against(cost, plan.certificate))
        found = self._overlapping(begun)
        return plan if found is begun else found

    def _overlapping(self, best: Found) -> Found:
        """The fastest of a plan and those that the solver finds when collectives cost what the step waits for, as far
        as the last plan's replay shows (see ``fxpar.exposure``)."""
        formulation = best.formulation
        if formulation is None or formulation.program.time is not None:
            return best
        if self._hidden(best) <= self.request.gap * best.prediction.step_ns:
            return best  # all is as it was priced
        if sum(v.states for v in formulation.problem.variables) > MOST_STATES:
            return best
        last, losses = best, 0
        shown: Exposed | None = None
        for _ in range(OVERLAP_ROUNDS):
            if last.prediction.exposed_ns <= self.request.gap * last.prediction.step_ns:
                break  # nothing is left to gain
            shown = exposed(formulation, last.waited).damped(shown)
            found = self._repriced(best, last, formulation, shown)
            if found is None:
                break
            last = found
            if rank(last) < rank(best):
                best = last
            else:
                losses += 1
                if losses == 2:
                    break
        return best

    @staticmethod
    def _hidden(found: Found) -> int:
        return found.prediction.communication_ns - found.prediction.exposed_ns

    def _repriced(self, best: Found, last: Found, formulation: Formulation, shown: Exposed) -> Found | None:
        """What the solver finds when collectives cost what is ``shown``; None where that is the last plan again."""
        request = self.request
        with request.progress(f"{best.name} on {formulation.mesh}, pricing what the step waits for"):
            candidates = [a for f in (best, last) if (a := formulation.assignment(f.decisions)) is not None]
            solution = solve(repriced(formulation, shown), gap=request.gap, candidates=candidates, effort=5,
                             start=last.start)
            if solution.assignment is None:
                return None
            decisions = formulation.decisions(solution.assignment)
            cost = cost_of(formulation, decisions)
            if decisions == last.decisions or cost is None:
                return None
            found = self.found(best.name, decisions, _held_against(cost, best.certificate))
            return replace(found, formulation=formulation, multiplier=best.multiplier, start=_messages(solution),
                           parameters_cut=best.parameters_cut,
                           counted=formulation.problem.memory(solution.assignment) * formulation.unit)

    def _fitting(
        self, name: str, mesh: Mesh, roles: tuple[str, ...], sharded: bool | None,
        starts: Callable[[], Sequence[Found]], reuse: Reuse = "never", in_time: InTime = ALONE,
    ) -> tuple[Found | None, bool]:
        """(plan, whether memory shaped it): the fastest without a limit if it fits, else the fastest within it.

        Raises:
            Infeasible: the roles leave some node no choice.
        """
        request = self.request
        always = recompute_nodes(request.program, "layers") if request.recompute == "on" else ()
        formulation = self.formulate(mesh, roles, sharded, None, always, reuse, in_time)
        free = self._solve(name, formulation, (), "")
        if free is None or free.fits:
            return free, False
        begin_with = starts()
        auto = request.recompute == "auto"
        within = formulation
        if auto:
            within = self.formulate(mesh, roles, sharded, request.budget_bytes, None, reuse, in_time)
        best = self._within(name, within, [free, *begin_with], ", with recomputation" if auto else "")
        return (best if best is not None and best.fits else smaller(free, best)), True

    def _within(self, name: str, formulation: Formulation, starts: Sequence[Found], what: str) -> Found | None:
        """The fastest plan that the simulator finds to fit, or the smallest found (see ``fxpar.within``)."""
        request = self.request
        return Within(
            lambda problem, begin_with, begin, times: self._attempt(name, problem, begin_with, what, begin, times),
            formulation, request.prices(formulation.mesh), limit=request.budget_bytes, gap=request.gap,
            own=name == OWN, starts=starts,
        ).run()

    def _solve(self, name: str, formulation: Formulation, starts: Sequence[Found], what: str) -> Found | None:
        return self._attempt(name, formulation, starts, what)[0]

    def _attempt(
        self, name: str, formulation: Formulation, starts: Sequence[Found], what: str, begin: Start | None = None,
        times: int = 1,
    ) -> tuple[Found | None, Solution]:
        mesh = formulation.mesh
        with self.request.progress(f"{name} on {mesh}{what}"):
            candidates = [a for s in starts if s.decisions.mesh.sizes == mesh.sizes
                          and (a := formulation.assignment(s.decisions)) is not None]
            effort = 10 if name == OWN else 5
            solution = solve(formulation.problem, gap=times * self.request.gap, candidates=candidates, start=begin,
                             effort=effort)
            return self._solved(name, formulation, solution), solution

    def _solved(self, name: str, formulation: Formulation, solution: Solution) -> Found | None:
        if solution.assignment is None or solution.cost is None:
            return None
        status = "optimal" if solution.status.value == "optimal" else "feasible"
        certificate = Certificate(status, solution.cost, solution.bound, solution.gap or 0.0)  # type: ignore[arg-type]
        found = self.found(name, formulation.decisions(solution.assignment), certificate)
        return replace(found, counted=(solution.memory or 0) * formulation.unit, formulation=formulation,
                       multiplier=solution.multiplier, start=_messages(solution))

    def certified(self, chosen: Found, own: Sequence[Found]) -> Certificate:
        """The certificate of the chosen plan: a hand-made one is held against the bound of the free problem of its
        mesh."""
        same_mesh = [f for f in own if f.decisions.mesh.sizes == chosen.decisions.mesh.sizes]
        basis = chosen if chosen in own else next(iter(same_mesh), None)
        if basis is None:
            return chosen.certificate
        mesh, request = chosen.decisions.mesh, self.request
        formulation, multiplier = basis.formulation, basis.multiplier
        if not basis.fits or formulation is None:
            # what the solver found on this mesh needs more memory: ask again with the budget
            cut = None if "dp" in roles_of(mesh) or request.constraints.zero is not None else False
            again = None if request.recompute == "auto" else chosen.decisions.recompute
            formulation = self.formulate(mesh, roles_of(mesh), cut, request.budget_bytes, again, self.reuse,
                                         in_time_of(chosen.decisions))
            multiplier = solve(formulation.problem, gap=request.gap).multiplier
            basis = replace(basis, parameters_cut=cut)
        prices = request.prices(mesh)
        question = question_of(formulation, prices, roles_of(mesh), basis.parameters_cut, request.batch_dim,
                               request.optimizer_bytes, request.constraints)
        exact = basis is chosen and chosen.certificate.status == "optimal"
        with request.progress("proving the bound"):
            made = certify(formulation, chosen.decisions, prices, question, multiplier=multiplier,
                           status="optimal" if exact else "feasible")
        return made if made is not None else _against(chosen, basis)


def replace_status(certificate: Certificate, status: str) -> Certificate:
    """The certificate with another status; its bound stays."""
    return msgspec.structs.replace(certificate, status=status)


Others = Callable[[Decisions], Sequence[tuple[str, Decisions]]]
"""Named decisions on the same mesh to hold beside the chosen ones."""


def run_search(
    request: Request, meshes: Sequence[Mesh], *, pinned: bool, others: Others | None = None
) -> tuple[Found, list[Candidate]]:
    """The plan to use and every candidate that was compared (the chosen one first).

    Args:
        meshes: tried in turn.
        pinned: the user named axes or gave constraints or hints: only plans that obey are chosen, the others are shown
            beside.
        others: further decisions to compare the fastest with; a faster one that fits is chosen.

    Raises:
        Infeasible: nothing fits the memory.
    """
    search = Search(request)
    manual: list[Found] = search.hinted(meshes)
    own: list[Found] = []
    for mesh in meshes:
        hand_made = search.manual_beside(mesh)
        plan = search.best(mesh, roles_of(mesh), partial(_together, tuple(manual), hand_made))
        manual += hand_made()
        own += [search.beyond(plan, manual)] if plan is not None else []
    fitting = [f for f in (*own, *manual) if f.fits and (f.obeys or not pinned)]
    if not fitting:
        raise too_large(own + manual, request.budget_bytes)
    chosen = min(fitting, key=lambda f: f.prediction.step_ns)
    beside = [f for f in (*own, *manual) if f is not chosen]
    for name, decisions in others(chosen.decisions) if others is not None else ():
        found = search.found(name, decisions, chosen.certificate)
        cost = None if chosen.formulation is None else cost_of(chosen.formulation, decisions)
        if found.fits and found.prediction.step_ns < chosen.prediction.step_ns and cost is not None:
            faster = replace(chosen, decisions=decisions, prediction=found.prediction, at_peak=found.at_peak,
                             certificate=_held_against(cost, chosen.certificate))
            own = [faster if f is chosen else f for f in own]
            chosen, found = faster, replace(chosen, name=f"other than {name}")
        beside.append(found)
    chosen = replace(chosen, certificate=search.certified(chosen, own))
    return chosen, [f.candidate() for f in (chosen, *beside)]


def _together(some: Sequence[Found], others: Callable[[], Sequence[Found]]) -> list[Found]:
    return [*some, *others()]


def cost_of(formulation: Formulation, decisions: Decisions) -> int | None:
    """ns of decisions in the priced problem, None when they are not among its assignments."""
    assignment = formulation.assignment(decisions)
    return None if assignment is None else formulation.problem.cost(assignment)


def _messages(solution: Solution) -> Start | None:
    """Where another problem may begin, without what only the very same one can take up."""
    return None if solution.start is None else replace(solution.start, prepared=None)


def _held_against(cost: int, certificate: Certificate) -> Certificate:
    """Of a plan that costs ``cost`` ns in a problem: held against the bound that a certificate has of it."""
    bound = min(certificate.bound_ns, cost)
    return Certificate("feasible", cost, bound, (cost - bound) / max(cost, 1))


def _against(chosen: Found, basis: Found) -> Certificate:
    """The certificate of a plan that is not among the assignments of the problem solved on its mesh: that problem's
    bound, without a proof."""
    if basis is chosen:
        return chosen.certificate
    return _held_against(chosen.certificate.cost_ns, basis.certificate)
