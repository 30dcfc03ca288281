"""Shapes of a cluster and what is estimated of them: all there are, and estimates that obey what holds for any."""

from __future__ import annotations

import dataclasses
import math

from hypothesis import given
from hypothesis import strategies as st

from fxpar.cells import Amounts, Cell
from fxpar.cost.cluster import parse_cluster
from fxpar.outer import MOST_STAGES, Shape, divisors, estimate, shapes

CLUSTERS = ("1x1:h100", "1x4:h100", "2x4:l40s", "3x2:a100", "2x8:h100", "8x1:a100")
amounts = st.builds(
    Amounts, *(st.floats(1e3, 1e8) for _ in range(4)), *(st.floats(1e6, 1e10) for _ in range(5)),
)
cells = st.builds(Cell, amounts, amounts, st.integers(1, 80))


def again(cell: Cell) -> Cell:
    """The same when layers run again: longer backward, less kept."""
    unit = dataclasses.replace(cell.unit, backward=cell.unit.backward + cell.unit.forward, kept=cell.unit.kept / 50)
    return dataclasses.replace(cell, unit=unit)


def of(shape, cell, cluster, budget):
    return estimate(shape, cell, lambda: again(cell), cluster, budget, 0.5)


@given(st.sampled_from(CLUSTERS), st.integers(1, 64), st.integers(1, 100))
def test_every_factorisation_is_there_once(text, batch, units):
    cluster = parse_cluster(text)
    found = list(shapes(cluster, batch, units))
    assert len(found) == len(set(found))
    want = {
        (pp, dp, tp, m)
        for pp in range(1, min(units, MOST_STAGES) + 1) for tp in range(1, cluster.devices_per_node + 1)
        for dp in range(1, cluster.world_size + 1) for m in range(1, batch + 1)
        if pp * dp * tp == cluster.world_size and cluster.devices_per_node % tp == 0 and batch % (dp * m) == 0
        and (pp == 1 or m >= max(pp, 2))
    }
    assert {(s.pp, s.dp, s.tp, s.microbatches) for s in found} == want


@given(st.integers(1, 5000))
def test_divisors(number):
    assert divisors(number) == [n for n in range(1, number + 1) if not number % n]


@given(st.sampled_from(CLUSTERS[1:]), cells, st.integers(1, 2**38), st.integers(1, 2**38), st.data())
def test_more_memory_is_never_slower_and_what_fits_fits(text, cell, one, two, data):
    cluster = parse_cluster(text)
    shape = data.draw(st.sampled_from(list(shapes(cluster, 96, cell.units))))
    small, large = sorted((one, two))
    few, much = of(shape, cell, cluster, small), of(shape, cell, cluster, large)
    assert few.fits <= much.fits
    assert few.fits == (few.peak_bytes <= small)
    if few.fits:
        assert much.step_ns <= few.step_ns * (1 + 1e-9)
        assert 0 <= few.again <= 1


@given(cells)
def test_one_rank_takes_what_its_layers_take(cell):
    cluster = parse_cluster("1x1:h100")
    whole = sum(getattr(cell.rest, f) + cell.units * getattr(cell.unit, f) for f in ("forward", "backward"))
    assert math.isclose(of(Shape(1, 1, 1, 4), cell, cluster, 2**60).step_ns, 4 * whole, rel_tol=1e-9)


@given(cells, st.sampled_from([2, 4, 8]))
def test_stages_are_never_faster_than_an_equal_share(cell, pp):
    cluster = parse_cluster("1x8:h100")
    whole = sum(getattr(cell.rest, f) + cell.units * getattr(cell.unit, f) for f in ("forward", "backward"))
    shape = Shape(pp, 8 // pp, 1, 8)
    assert of(shape, cell, cluster, 2**60).step_ns >= 8 * whole / pp * (1 - 1e-9)
