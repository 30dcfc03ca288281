"""The whole choice: mesh, stages, microbatches and schedule, with everything below them.

    survey      every shape of the cluster estimated (fxpar.outer, from the cells of fxpar.cells)
    examine     the first of them searched and simulated in full, two at a time where there is a second core
    decide      the fastest that fits; of all others is said why they lost

Shapes are examined in the order of their estimates until the next one's is well above the best that was found, or a
number of them is reached that depends on the size of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from fxpar.beside import beside
from fxpar.candidates import Flight, Found, Request
from fxpar.cells import Cell, Depths, cell_of
from fxpar.cost.cluster import Cluster
from fxpar.often import ways_in_time
from fxpar.outer import Estimate, Shape, divisors, estimate, shapes
from fxpar.plans.errors import FxparError, Infeasible
from fxpar.plans.mesh import Axis, Mesh
from fxpar.plans.plan import Candidate, Certificate, Considered, Decisions, Prediction
from fxpar.plans.program import Program
from fxpar.progress import silent
from fxpar.restrict import roles_of
from fxpar.schedules import SCHEDULES
from fxpar.search import Search
from fxpar.simulate import OptimizerBytes
from fxpar.staged import AXIS, StageCutter, Staged, stages_in_words

LARGEST_CELL = 16
"""Samples of the larger of the two microbatches that are measured."""
AGAIN_BUDGETS = 2
"""Times that placements are looked for within less memory when no schedule's stages fit."""
WORTHWHILE = 300
"""Nodes of a program from which on a second process pays."""
SLACK = 0.05
"""Shapes are examined whose estimate is at most this much above the best that was found."""
SKETCHED, SKETCHED_OF_LARGE, LARGE = 8, 6, 8000
"""Shapes that are simulated in full, placed as people do; of programs with more than :data:`LARGE` nodes."""
REFINED, REFINED_OF_LARGE = 4, 2
"""Of those, how many are searched with every placement open."""
LISTED = 60
"""Shapes that the plan lists."""


@dataclass(frozen=True, eq=False)
class Model:
    """What is compiled: ``in_microbatches(n)`` is its program of one of ``n``; ``depths(n)`` those from which cells are
    measured; ``batch``: samples; ``computed``: bytes of parameters as computed with, per byte stored."""

    in_microbatches: Callable[[int], Program]
    depths: Callable[[int], Depths]
    batch: int
    batch_dim: int | None
    computed: float
    optimizer_bytes: OptimizerBytes


@dataclass(frozen=True)
class Examined:
    """A shape searched and simulated in full; without decisions when nothing was found that fits."""

    estimate: Estimate
    decisions: Decisions | None = None
    prediction: Prediction | None = None
    certificate: Certificate | None = None
    note: str = ""
    # what was found on the mesh inside a stage
    inside: Found | None = None

    @property
    def step_ns(self) -> float:
        """Of the plan, infinite without one."""
        return float("inf") if self.prediction is None else float(self.prediction.step_ns)


@dataclass(eq=False)
class Survey:
    """Estimates of every shape of a cluster."""

    model: Model
    cluster: Cluster
    budget: int
    cells: dict[tuple[int, int, bool], Cell] = field(default_factory=dict)

    def estimates(self) -> list[Estimate]:
        """Of all shapes, what fits and is fastest first; half of them are made beside, where there is a core for it."""
        every = list(shapes(self.cluster, self.model.batch, self.model.depths(1).units))
        wide = sorted({shape.tp for shape in every})[1::2]
        halves = [[s for s in every if (s.tp in wide) == one] for one in (False, True)]
        other = beside(partial(self._of, halves[1]), worthwhile=len(self.model.depths(1).shallow.nodes) > WORTHWHILE)
        found = [*self._of(halves[0]), *other()]
        return sorted(found, key=lambda e: (not e.fits, e.step_ns if e.fits else e.peak_bytes, e.shape))

    def _of(self, some: Sequence[Shape]) -> list[Estimate]:
        return [
            estimate(shape, self.cell(shape, again=False), partial(self.cell, shape, again=True), self.cluster,
                     self.budget, self.model.computed)
            for shape in some
        ]

    def cell(self, shape: Shape, *, again: bool) -> Cell:
        """The shape's cell: measured, or on the line through two that were (times and bytes are nearly affine in the
        samples of a microbatch)."""
        samples = self.model.batch // (shape.dp * shape.microbatches)
        large = measured_samples(self.model.batch)[-1]
        if samples in (1, large):
            return self.measure(samples, shape.tp, again)
        return between(self.measure(1, shape.tp, again), self.measure(large, shape.tp, again),
                       (samples - 1) / (large - 1))

    def measure(self, samples: int, tensor: int, again: bool) -> Cell:
        key = (samples, tensor, again)
        if key not in self.cells:
            depths = self.model.depths(self.model.batch // samples)
            self.cells[key] = cell_of(depths, tensor, self.cluster, self.model.optimizer_bytes, self.model.batch_dim,
                                      again=again)
        return self.cells[key]


def measured_samples(batch: int) -> tuple[int, ...]:
    """Samples of the microbatches that are measured."""
    return tuple(sorted({1, max(n for n in divisors(batch) if n <= LARGEST_CELL)}))


def between(one: Cell, other: Cell, share: float) -> Cell:
    """The cell that lies the given share of the way from one to another, or beyond."""
    return replace(one, unit=one.unit.plus(one.unit.to(other.unit), share),
                   rest=one.rest.plus(one.rest.to(other.rest), share))


@dataclass(frozen=True)
class Choice:
    """What was chosen and out of what: ``program`` and ``decisions`` on its whole mesh; ``words`` of its stages."""

    program: Program
    decisions: Decisions
    prediction: Prediction
    certificate: Certificate
    candidates: tuple[Candidate, ...]
    words: str
    considered: tuple[Considered, ...]


Natural = Callable[[], tuple[Found, list[Candidate]]]
"""The search on the meshes of the cluster's own shape, without microbatches and stages."""


def choose(model: Model, cluster: Cluster, request: Request, natural: Natural) -> Choice:
    """The fastest plan of all shapes.

    Args:
        request: for the whole batch, its budget that of a device; its mesh is open.

    Raises:
        Infeasible: nothing fits.
    """
    with request.progress("weighing meshes, stages and microbatches"):
        estimates = Survey(model, cluster, request.budget_bytes).estimates()
    large = len(request.program.nodes) > LARGE
    plain: Found | None = None
    refused: Infeasible | None = None
    candidates: tuple[Candidate, ...] = ()
    examined: list[Examined] = []
    # a large program's own meshes are searched with all others, as their estimates come, and alone where none fits
    if large:
        examined = _examine_in_turn(model, cluster, request, estimates, None, large=True)
    if not any(e.prediction is not None for e in examined):
        try:
            plain, found = natural()
            candidates = tuple(found)
        except Infeasible as error:
            refused = error
    if not large:
        examined = _examine_in_turn(model, cluster, request, estimates, plain, large=False)
    fitting = [e for e in examined if e.prediction is not None]
    best = min(fitting, key=lambda e: e.step_ns, default=None)
    if best is None and plain is None:
        assert refused is not None  # the cluster's own meshes were searched and do not fit either
        raise refused
    if best is None or (plain is not None and plain.prediction.step_ns <= best.step_ns):
        assert plain is not None
        considered = considered_of(estimates, examined, plain.prediction.step_ns, plain)
        return Choice(request.program, plain.decisions, plain.prediction, plain.certificate, candidates, "", considered)
    assert best.decisions is not None and best.prediction is not None and best.certificate is not None
    chosen = Candidate("fxpar", best.decisions.mesh, True, best.prediction, str(best.estimate.shape))
    return Choice(
        model.in_microbatches(best.estimate.shape.microbatches), best.decisions, best.prediction, best.certificate,
        (chosen, *candidates), best.note, considered_of(estimates, examined, best.step_ns, best),
    )


def _examine_in_turn(
    model: Model, cluster: Cluster, request: Request, estimates: Sequence[Estimate], plain: Found | None, *,
    large: bool,
) -> list[Examined]:
    """Sketches of the shapes worth it, the fastest of them refined; two at a time."""
    best = float("inf") if plain is None else float(plain.prediction.step_ns)
    quiet = replace(request, progress=silent)
    apart = len(request.program.nodes) > WORTHWHILE
    # what has no microbatches and no stages, on the meshes of the cluster's own shape, has been searched
    seen = {(cluster.nodes, cluster.devices_per_node), (cluster.world_size,)} if plain is not None else set()
    todo = [e for e in estimates if e.fits and not (
        e.shape.pp == e.shape.microbatches == 1 and e.shape.sizes in seen)]
    sketches: list[Examined] = []
    most = SKETCHED_OF_LARGE if large else SKETCHED
    while len(sketches) < most and (now := [e for e in todo[:2] if e.step_ns <= best * (1 + SLACK)]):
        todo = todo[len(now) :]
        with request.progress(f"simulating {' and '.join(str(e.shape) for e in now)}"):
            sketches += _two_at_a_time([partial(sketched, model, cluster, quiet, e) for e in now], apart)
        best = min([best, *(e.step_ns for e in sketches)])
    sketches.sort(key=lambda e: (e.step_ns, e.estimate.shape))
    chosen = [e for e in sketches if e.step_ns <= best * (1 + SLACK)][: REFINED_OF_LARGE if large else REFINED]
    refined: list[Examined] = []
    for n in range(0, len(chosen), 2):
        pair = chosen[n : n + 2]
        with request.progress(f"searching {' and '.join(str(e.estimate.shape) for e in pair)}"):
            refined += _two_at_a_time([partial(refine, model, cluster, quiet, e) for e in pair], apart)
    return [*refined, *(e for e in sketches if e not in chosen)]


def sketched(model: Model, cluster: Cluster, request: Request, found: Estimate) -> Examined:
    """A shape placed as was estimated; what cannot be made of the model says why."""
    try:
        return Examination(model, cluster, request, found).sketched()
    except FxparError as error:
        return Examined(found, note=error.what)


def refine(model: Model, cluster: Cluster, request: Request, sketch: Examined) -> Examined:
    """A sketch with every placement open."""
    return Examination(model, cluster, request, sketch.estimate).refined(sketch)


def _two_at_a_time(works: Sequence[Callable[[], Examined]], apart: bool) -> list[Examined]:
    others = [beside(w, worthwhile=apart) for w in works[1:]]
    return [works[0](), *(other() for other in others)]


def considered_of(
    estimates: Sequence[Estimate], examined: Sequence[Examined], step_ns: float, chosen: Examined | Found | None
) -> tuple[Considered, ...]:
    """What the plan tells of the shapes, those examined first, then by their estimates.

    Args:
        step_ns: of the chosen plan, ``chosen``.
    """
    rows, done = [], {e.estimate.shape for e in examined}
    if isinstance(chosen, Found):
        here = [e for e in estimates if e.shape.pp == e.shape.microbatches == 1
                and e.shape.sizes == chosen.decisions.mesh.sizes]
        # a free mesh is that of all who cut it another way
        rows += [_row(e, chosen.prediction.step_ns, "" if e is here[0] else "the same free mesh") for e in here]
        done.update(e.shape for e in here)
    for e in sorted(examined, key=lambda e: (e.step_ns, e.estimate.shape)):
        slower = f"{e.step_ns / step_ns - 1:.1%} slower" if e.prediction is not None else e.note
        rows.append(_row(e.estimate, e.prediction.step_ns if e.prediction else None, "" if e is chosen else slower))
    for estimate_ in (e for e in estimates if e.shape not in done):
        slower = f"estimated {estimate_.step_ns / step_ns - 1:.1%} slower" if estimate_.step_ns > step_ns else (
            "its estimate is near, others were searched")
        rows.append(_row(estimate_, None, slower if estimate_.fits else "estimated not to fit"))
    return tuple(rows[:LISTED])


def _row(found: Estimate, step_ns: int | None, lost: str) -> Considered:
    s = found.shape
    return Considered(s.pp, s.dp, s.tp, s.microbatches, round(found.step_ns), round(found.peak_bytes), step_ns, lost)


@dataclass(eq=False)
class Examination:
    """One shape, searched and simulated in full. :meth:`sketched`: as people would place it, which is what was
    estimated; :meth:`refined`: with every placement open, from a sketch on.

    ``request``: for the whole batch on one mesh; its budget is that of a device. ``schedules``: of stages, those tried.
    """

    model: Model
    cluster: Cluster
    request: Request
    estimate: Estimate
    schedules: Sequence[str] = tuple(SCHEDULES)

    def __post_init__(self) -> None:
        shape, request = self.estimate.shape, self.request
        program = self.model.in_microbatches(shape.microbatches)
        self.inside = Mesh(tuple(Axis(f"a{i}", n) for i, n in enumerate(shape.sizes)))
        self.inner = replace(request, program=program, in_time=ways_in_time(program, self.estimate.zero)[0])
        self.staged: Staged | None = None
        if shape.pp > 1:
            named = () if shape.sizes == (1,) else self.inside.axes
            staged = self.staged = Staged(Mesh((Axis(AXIS, shape.pp), *named)), 0, self.inside, "1f1b", 1)
            prices = staged.prices(self.cluster, self.inside)
            self.inner = replace(
                self.inner, prices=lambda _: prices, budget_bytes=request.budget_bytes * shape.pp,
                flight=Flight(shape.pp),
            )

    def sketched(self) -> Examined:
        """Batch and weights cut as the shape says, parameters stored as was estimated."""
        shape, zero = self.estimate.shape, self.estimate.zero
        roles = tuple(name for name, n in (("dp", shape.dp), ("tp", shape.tp)) if n > 1) or ("",)

        def placed(search: Search) -> Found | None:
            return search.by_hand("as people do", self.inside, roles, zero)

        return self._examined(placed)

    def refined(self, sketch: Examined) -> Examined:
        """The fastest, at most as slow as the sketch."""

        def placed(search: Search) -> Found | None:
            begin = () if sketch.inside is None else (sketch.inside,)
            return search.best(self.inside, roles_of(self.inside), lambda: begin)

        found = self._examined(placed)
        return found if found.step_ns < sketch.step_ns else sketch

    def _examined(self, placed: Callable[[Search], Found | None]) -> Examined:
        if self.staged is None:
            found = placed(Search(self.inner))
            if found is None or not found.fits:
                return Examined(self.estimate, note="does not fit")
            plain = replace(found, formulation=None)
            return Examined(self.estimate, found.decisions, found.prediction, found.certificate, "", plain)
        request, device = self.inner, self.request.budget_bytes
        before: Decisions | None = None
        for _ in range(AGAIN_BUDGETS + 1):
            found = placed(Search(request))
            if found is None or found.decisions == before:
                break
            before = found.decisions
            made = self._with_schedules(self.staged, found)
            if not made:
                return Examined(self.estimate, note="no schedule exists for these numbers")
            fitting = [m for m in made if m[1].peak_bytes <= device]
            if fitting:
                decisions, prediction, words = min(fitting, key=lambda m: m[1].step_ns)
                return Examined(self.estimate, decisions, prediction, Certificate(
                    "feasible", prediction.step_ns, 0, 1.0), words, replace(found, formulation=None))
            smallest = min(m[1].peak_bytes for m in made)
            # what the fullest stage holds beyond its share of the whole
            less = min(request.budget_bytes, found.prediction.peak_bytes) * device * 19 // (smallest * 20)
            request = replace(request, budget_bytes=less)
        return Examined(self.estimate, note="its stages do not fit")

    def _with_schedules(self, staged: Staged, found: Found) -> list[tuple[Decisions, Prediction, str]]:
        program = self.inner.program
        cutter = StageCutter(program, found.decisions, self.cluster, self.inner.optimizer_bytes)
        made = []
        for name in self.schedules:
            tried = replace(staged, schedule=name, per_rank=SCHEDULES[name].stages_per_rank or 2)
            try:
                decisions, prediction, walk = cutter.cut(tried)
            except FxparError:  # too few layers, or not a number of microbatches for it: there are others
                continue
            made.append((decisions, prediction, stages_in_words(program, decisions, walk)))
        return made
