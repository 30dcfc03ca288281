"""Which plan: the solver's on every mesh considered, beside the plans people make by hand.

Each candidate is rewritten and simulated; the fastest that fits the memory wins, so the chosen plan is never worse
than plain data parallel, ZeRO-3 or Megatron tensor parallel under the same cost model.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fxpar.formulate import MEMORY_UNIT, Formulation, formulate, output_layouts
from fxpar.layers import tie_layers
from fxpar.names import batch_class, classes_of
from fxpar.plans.errors import Infeasible
from fxpar.plans.mesh import Axis, Mesh
from fxpar.plans.plan import Candidate, Certificate, Decisions, Prediction
from fxpar.plans.program import Program
from fxpar.prices import Prices
from fxpar.progress import Progress
from fxpar.recompute import recompute_nodes
from fxpar.restrict import Restriction, roles_of, weight_operands, weight_values
from fxpar.rules.choices import joint_choices
from fxpar.show import gib
from fxpar.simulate import OptimizerBytes, simulate
from fxpar.solver.solution import Solution
from fxpar.solver.solve import solve
from fxpar.stored import stored_layouts

# solved again with a smaller budget at most this often when the simulator finds more memory in use than the problem
# knows of (gathered copies, temporaries)
MEMORY_ROUNDS = 3


@dataclass(frozen=True, eq=False)
class Request:
    """What is searched: the program (dims and hubs in), prices per mesh, limits, levels of recomputation allowed."""

    program: Program
    prices: Callable[[Mesh], Prices]
    budget_bytes: int
    optimizer_bytes: OptimizerBytes
    batch_dim: int | None
    gap: float
    progress: Progress
    levels: tuple[str, ...] = ("none",)


@dataclass(frozen=True)
class Found:
    """One simulated candidate; ``obeys``: it does what the names of the mesh's axes ask for."""

    name: str
    decisions: Decisions
    prediction: Prediction
    certificate: Certificate
    fits: bool
    obeys: bool = True

    def candidate(self) -> Candidate:
        """As the plan file records it."""
        again = len(self.decisions.recompute)
        note = f"recomputes {again} nodes" if again else ""
        return Candidate(self.name, self.decisions.mesh, self.fits, self.prediction, note)


def natural_meshes(nodes: int, devices: int) -> tuple[Mesh, ...]:
    """Meshes tried when the user names none: the cluster's own shape, and one more axis inside a node of 4 or more."""
    shapes: list[tuple[int, ...]] = [tuple(n for n in (nodes, devices) if n > 1) or (1,)]
    if nodes == 1 and devices >= 4 and devices % 2 == 0:
        shapes.append((2, devices // 2))
    return tuple(Mesh(tuple(Axis(f"a{i}", n) for i, n in enumerate(s))) for s in shapes)


def manual_roles(mesh: Mesh) -> tuple[tuple[str, tuple[str, ...], bool], ...]:
    """Hand-made plans on a mesh of free axes: (name, roles, parameters cut on dp)."""
    axes = len(mesh.axes)
    tensor = (*("dp",) * (axes - 1), "tp")
    return (
        ("data parallel", ("dp",) * axes, False),
        ("ZeRO-3", ("dp",) * axes, True),
        ("Megatron tensor parallel" if axes == 1 else "data + Megatron tensor parallel", tensor, False),
    )


class Search:
    """Candidates of one request; :meth:`run` finds them all."""

    def __init__(self, request: Request) -> None:
        self.request = request
        program = request.program
        self.classes = classes_of(program)
        self.batch = frozenset(batch_class(program, request.batch_dim))
        self.weights = weight_operands(program)
        self.weight_values = weight_values(program, self.weights)

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
        self, mesh: Mesh, roles: tuple[str, ...], sharded: bool | None, budget: int | None, level: str
    ) -> Formulation:
        """The problem on a mesh with axes in the given roles, at a level of recomputation."""
        restriction = self.restriction(roles, sharded)
        restricted = any(roles)
        return formulate(
            self.request.program, mesh, self.request.prices(mesh), budget_bytes=budget,
            optimizer_bytes=self.request.optimizer_bytes,
            recompute=recompute_nodes(self.request.program, level),
            node_filter=restriction.nodes if restricted else None,
            input_filter=restriction.inputs if restricted else None,
        )

    def found(self, name: str, decisions: Decisions, certificate: Certificate) -> Found:
        """Simulate decisions."""
        request = self.request
        prediction = simulate(request.program, decisions, request.prices(decisions.mesh), request.optimizer_bytes)
        return Found(name, decisions, prediction, certificate, prediction.peak_bytes <= request.budget_bytes)

    def manual(self, mesh: Mesh) -> list[Found]:
        """The hand-made plans on a mesh, each with the least recomputation with which it fits (or none does)."""
        results = []
        for name, roles, sharded in manual_roles(mesh):
            obeys = all(asked in ("", role) for asked, role in zip(roles_of(mesh), roles, strict=True))
            for level in self.request.levels:
                with self.request.progress(f"{name} on {mesh}{_with(level)}"):
                    formulation = self.formulate(mesh, roles, sharded, None, level)
                    found = self._solved(name, formulation, solve(formulation.problem, gap=self.request.gap))
                if found is not None and (found.fits or level == self.request.levels[-1]):
                    results.append(replace(found, obeys=obeys))
                    break
        return results

    def best(self, mesh: Mesh, roles: tuple[str, ...], starts: Sequence[Found]) -> Found | None:
        """The solver's fastest plan on a mesh; more recomputation, and parameters cut on dp axes, are tried only where
        memory binds."""
        best: Found | None = None
        for sharded in (False, None) if "dp" in roles else (False,):
            for level in self.request.levels:
                found, binds = self._best_at(level, mesh, roles, sharded, starts)
                if found is not None and (best is None or (not found.fits, found.prediction.step_ns) < (
                    not best.fits, best.prediction.step_ns
                )):
                    best = found
                if not binds:
                    return best
        return best

    def _best_at(
        self, level: str, mesh: Mesh, roles: tuple[str, ...], sharded: bool | None, starts: Sequence[Found]
    ) -> tuple[Found | None, bool]:
        """(plan, whether memory shaped it): the budget is tightened while the simulator finds it exceeded."""
        request = self.request
        budget = request.budget_bytes
        formulation = self.formulate(mesh, roles, sharded, budget, level)
        result: Found | None = None
        for attempt in range(MEMORY_ROUNDS):
            with request.progress(f"solving on {mesh}{_with(level)}"):
                candidates = [a for s in starts if s.decisions.mesh.sizes == mesh.sizes
                              and (a := formulation.assignment(s.decisions)) is not None]
                solution = solve(formulation.problem, gap=request.gap, candidates=candidates)
            solved = self._solved("fxpar", formulation, solution)
            if solved is None:
                return result, True
            result = solved
            if result.fits:
                return result, attempt > 0 or solution.multiplier > 0
            excess = result.prediction.peak_bytes - request.budget_bytes
            budget -= excess + excess // 8
            if budget <= 0:
                break
            formulation = replace(formulation, problem=replace(formulation.problem, budget=budget // MEMORY_UNIT))
        return result, True

    def _solved(self, name: str, formulation: Formulation, solution: Solution) -> Found | None:
        if solution.assignment is None or solution.cost is None:
            return None
        status = "optimal" if solution.status.value == "optimal" else "feasible"
        certificate = Certificate(status, solution.cost, solution.bound, solution.gap or 0.0)  # type: ignore[arg-type]
        return self.found(name, formulation.decisions(solution.assignment), certificate)


def _with(level: str) -> str:
    return "" if level == "none" else f", recomputing {level}"


def run_search(request: Request, meshes: Sequence[Mesh], *, pinned: bool) -> tuple[Found, list[Candidate]]:
    """The plan to use and every candidate that was compared (the chosen one first).

    Args:
        meshes: tried in turn.
        pinned: the user named the axes: only plans that obey the names are chosen, the others are shown beside.

    Raises:
        Infeasible: nothing fits the memory.
    """
    search = Search(request)
    manual: list[Found] = []
    own: list[Found] = []
    for mesh in meshes:
        manual += search.manual(mesh)
        plan = search.best(mesh, roles_of(mesh), manual)
        own += [plan] if plan is not None else []
    fitting = [f for f in (*own, *manual) if f.fits and (f.obeys or not pinned)]
    if not fitting:
        raise too_large(own + manual, request.budget_bytes)
    chosen = min(fitting, key=lambda f: f.prediction.step_ns)
    others = [f for f in (*own, *manual) if f is not chosen]
    chosen = replace(chosen, certificate=_against(chosen, own))
    return chosen, [f.candidate() for f in (chosen, *others)]


def _against(chosen: Found, own: Sequence[Found]) -> Certificate:
    """The certificate of the chosen plan: a hand-made one is held against the bound of the free problem of its mesh."""
    solved = [f for f in own if f.decisions.mesh.sizes == chosen.decisions.mesh.sizes]
    if chosen in own or not solved:
        return chosen.certificate
    cost, bound = chosen.certificate.cost_ns, min(chosen.certificate.cost_ns, solved[0].certificate.bound_ns)
    return Certificate("feasible", cost, bound, (cost - bound) / max(cost, 1))


def too_large(tried: Sequence[Found], budget: int) -> Infeasible:
    """The error when nothing that is allowed fits, with the parts of the smallest plan that was tried."""
    way_out = "give more devices (--cluster, --mesh), more memory (--memory), or a smaller batch"
    small = [f for f in tried if f.fits]
    if small:
        best = min(small, key=lambda f: f.prediction.step_ns)
        sizes = "x".join(map(str, best.decisions.mesh.sizes))
        return Infeasible(
            f"no plan with these mesh axes fits in {gib(budget)} per device", where=f"--mesh {best.decisions.mesh}",
            numbers=f"{best.name} on the same devices needs {gib(best.prediction.peak_bytes)}",
            way_out=f"leave the axes anonymous (--mesh {sizes}), or {way_out}",
        )
    if not tried:
        return Infeasible(f"the model does not fit: no plan found within {gib(budget)} per device", way_out=way_out)
    least = min(tried, key=lambda f: f.prediction.peak_bytes)
    p = least.prediction
    return Infeasible(
        f"the model does not fit: it needs {gib(p.peak_bytes)} of {gib(budget)} per device",
        where=f"the smallest plan found: {least.name} on {least.decisions.mesh}",
        numbers=f"parameters {gib(p.parameter_bytes)}, gradients {gib(p.gradient_bytes)}, "
                f"optimizer {gib(p.optimizer_bytes)}, activations {gib(p.activation_bytes)}",
        way_out=way_out,
    )


def random_decisions(program: Program, mesh: Mesh, seed: int) -> Decisions:
    """Any feasible decisions: a uniformly drawn choice for every node and input, layers not tied."""
    draw = random.Random(seed)
    classes = tie_layers(program, tied=False)
    choices = tuple(draw.choice(joint_choices(site, mesh)).names for site in classes.sites)
    inputs = tuple(draw.choice(stored_layouts(i, program.dims[i.value], mesh)) for i in program.inputs)
    return Decisions(mesh, choices, inputs, output_layouts(program, inputs, mesh))
