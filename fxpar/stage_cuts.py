"""Where to cut a program into stages of about equal time.

A cut lies between layers where there are enough of them, else before any op. What an op's module costs in backward is
counted with its forward ops, what every stage runs that reads it (casts of parameters, which stand before all layers)
where it is read first. Values that cross a cut are not priced here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fxpar.plans.errors import FxparError
from fxpar.plans.plan import Decisions
from fxpar.plans.program import Program, node_inputs
from fxpar.plans.stages import free_nodes
from fxpar.prices import Prices
from fxpar.recompute import layer_of
from fxpar.rules.choices import choice_by_names, sites_of

MOST_PLACES = 400
"""Places that are weighed; of more, these are taken evenly."""


def even_cuts(program: Program, decisions: Decisions, prices: Prices, stages: int) -> tuple[int, ...]:
    """Nodes before which forward is cut, so that the slowest of ``stages`` stages is as fast as can be.

    Args:
        decisions: of the mesh inside a stage, which ``prices`` are of.

    Raises:
        FxparError: the program has too few ops, or too few modules with parameters: a stage without any would only
            wait.
    """
    holders = sorted({e.name.rpartition(".")[0] for e in program.inputs if e.kind == "parameter"})
    if len(holders) < stages:
        raise FxparError(
            f"{stages} stages cannot be cut out of a model with parameters in {len(holders)} "
            f"module{'s' * (len(holders) != 1)}",
            where=f"--mesh; {', '.join(h or 'the model itself' for h in holders)}",
            numbers="a stage without parameters would only wait for its neighbours",
            way_out=f"at most {max(len(holders), 1)} stages: fewer ranks on pp, or fewer stages per rank",
        )
    last = max(n for n, node in enumerate(program.nodes) if node.phase == "forward")
    free = free_nodes(program)
    weights = where_read(program, free, node_weights(program, decisions, prices))
    total = [0]
    for index in range(last + 1):
        total.append(total[-1] + weights[index])
    places = layer_starts(program, last, free)
    if len(places) < stages - 1:
        places = own_nodes(program, last, free)[1:]
        step = -(-len(places) // MOST_PLACES)
        places = places[::step] if len(places) // step >= stages - 1 else places
    if len(places) < stages - 1:
        raise FxparError(
            f"{stages} stages cannot be cut out of {len(places) + 1} forward ops", where="--mesh",
            way_out="fewer ranks on pp, or fewer stages per rank",
        )
    return best_cuts([total[p] for p in places], total[-1], places, stages)


def best_cuts(before: Sequence[int], whole: int, places: Sequence[int], stages: int) -> tuple[int, ...]:
    """The cuts of the partition whose heaviest part is lightest (dynamic program over places).

    Args:
        before: weight in front of each place.
    """
    best = list(before)  # of the parts so far, the heaviest, when the last cut is at place i
    chosen: list[list[int]] = []
    for part in range(2, stages):
        now, back = [whole + 1] * len(places), [-1] * len(places)
        for end in range(part - 1, len(places)):
            for cut in range(part - 2, end):
                heaviest = max(best[cut], before[end] - before[cut])
                if heaviest < now[end]:
                    now[end], back[end] = heaviest, cut
        best = now
        chosen.append(back)
    if stages == 1:
        return ()
    end = min(range(stages - 2, len(places)), key=lambda i: (max(best[i], whole - before[i]), i))
    cuts = [end]
    for back in reversed(chosen):
        cuts.append(back[cuts[-1]])
    return tuple(places[i] for i in reversed(cuts))


def layer_starts(program: Program, last: int, free: Sequence[bool]) -> list[int]:
    """Forward nodes with which another layer begins, or what follows the layers; none of those that every stage runs
    (``free``)."""
    own = own_nodes(program, last, free)
    layers = [layer_of(program.nodes[index].module) for index in own]
    return [index for index, before, layer in zip(own[1:], layers, layers[1:], strict=False) if layer != before]


def own_nodes(program: Program, last: int, free: Sequence[bool]) -> list[int]:
    """Forward nodes up to ``last`` that run in one stage alone."""
    return [n for n in range(last + 1) if program.nodes[n].phase == "forward" and not free[n]]


def where_read(program: Program, free: Sequence[bool], weights: Sequence[int]) -> list[int]:
    """The weights of ``free`` nodes moved to the first forward node that reads them and is not."""
    moved = list(weights)
    first: dict[int, int] = {}  # value -> its first reader
    for index, node in enumerate(program.nodes):
        for value in node_inputs(node) if node.phase == "forward" else ():
            first.setdefault(value, index)
    for index, node in enumerate(program.nodes):
        readers = [first[v] for v in node.outputs if v in first]
        if free[index] and readers:
            moved[min(readers)] += moved[index]
            moved[index] = 0
    return moved


def node_weights(program: Program, decisions: Decisions, prices: Prices) -> list[int]:
    """Per node its ns; of forward nodes with their share of their module's backward."""
    mesh = decisions.mesh
    times: list[int] = []
    for site, names in zip(sites_of(program), decisions.choices, strict=True):
        choice = choice_by_names(site, names, mesh)
        times.append(0 if choice is None else prices.op_ns(site, choice))
    forward: Counter[str] = Counter()
    backward: Counter[str] = Counter()
    for node, time in zip(program.nodes, times, strict=True):
        (forward if node.phase == "forward" else backward)[node.module] += time
    return [
        time + (backward[node.module] * time // forward[node.module] if forward[node.module] else 0)
        if node.phase == "forward" else 0
        for node, time in zip(program.nodes, times, strict=True)
    ]
