"""All pairs at once cost what each pair costs alone."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpar.cost.cluster import parse_cluster
from fxpar.overlap import CommunicationPrices
from fxpar.plans.layout import REPLICATE, Partial, Shard, valid_layout
from fxpar.plans.mesh import parse_mesh
from fxpar.plans.program import TensorType
from fxpar.prices import Prices
from fxpar.reshard_tables import KnownPairs, ReshardTable

CLUSTERS = {"2": "2:cpu", "3": "3:cpu", "2x2": "2x2:h100", "2x8": "2x8:h100", "4x8": "4x8:h100",
            "2x2x2": "4x2:h100", "4x8x8": "32x8:h100"}


@st.composite
def cases(draw):
    mesh = parse_mesh(draw(st.sampled_from(sorted(CLUSTERS))))
    dims = tuple(
        tuple(draw(st.lists(st.sampled_from([2, 3, 4, 8, 16, 128]), max_size=2)))
        for _ in range(draw(st.integers(1, 3)))
    )
    shards = [Shard(d, first, length) for d, atoms in enumerate(dims) for first in range(len(atoms))
              for length in range(1, len(atoms) - first + 1)]
    places = [REPLICATE, Partial("sum"), Partial("max"), *shards]
    layouts = [lay for lay in product(places, repeat=len(mesh.sizes)) if valid_layout(lay, dims)]
    some = st.lists(st.sampled_from(layouts), min_size=1, max_size=8)
    return mesh, dims, draw(some), draw(some), draw(st.sampled_from(["reshard", "gradient", "input"]))


@given(cases(), st.sampled_from([Prices, CommunicationPrices]))
def test_a_table_holds_the_price_of_every_pair(case, kind_of_prices):
    mesh, dims, sources, targets, priced = case
    prices = kind_of_prices(parse_cluster(CLUSTERS["x".join(map(str, mesh.sizes))]), mesh)
    shape = tuple(int(np.prod(atoms)) for atoms in dims)
    kind = TensorType(shape, "bfloat16")
    price = getattr(prices, f"{priced}_ns")

    def possible(a, b):
        try:
            return price(a, b, dims, kind)
        except ValueError:
            return None

    sources = [s for s in sources if all(possible(s, t) is not None for t in targets)]
    if not sources:
        return
    table = ReshardTable(dims, mesh, [p for lay in (*sources, *targets) for p in lay],
                         lambda step, axis, n, shared: prices.move_ns(step, axis, n, "bfloat16", shared), priced)
    found, local = table.matrix(sources, targets)
    if kind_of_prices is Prices:
        alone = CommunicationPrices(prices.cluster, mesh)
        sent = [[getattr(alone, f"{priced}_ns")(s, t, dims, kind) for t in targets] for s in sources]
        assert (found - local).tolist() == sent
    assert found.tolist() == [[price(s, t, dims, kind) for t in targets] for s in sources]


@given(cases(), st.data())
def test_pairs_computed_before_are_the_same(case, data):
    mesh, dims, sources, targets, priced = case
    cluster = parse_cluster(CLUSTERS["x".join(map(str, mesh.sizes))])
    kind = TensorType(tuple(int(np.prod(atoms)) for atoms in dims), "bfloat16")
    known = KnownPairs(dims, mesh, lambda step, axis, n, shared: Prices(cluster, mesh).move_ns(
        step, axis, n, "bfloat16", shared), priced)
    price = getattr(Prices(cluster, mesh), f"{priced}_ns")
    for _ in range(3):
        some = data.draw(st.lists(st.sampled_from(sources), min_size=1, max_size=4, unique=True))
        others = data.draw(st.lists(st.sampled_from(targets), min_size=1, max_size=4, unique=True))
        try:
            expected = [[price(s, t, dims, kind) for t in others] for s in some]
        except ValueError:
            with pytest.raises(ValueError, match="no "):
                known.table(some, others)
            return
        assert known.table(some, others).tolist() == expected


@pytest.mark.parametrize("pairs", [1, 400])
def test_the_choice_of_method_changes_nothing(pairs):
    mesh, dims = parse_mesh("2x8"), ((64, 128), (512,))
    prices = Prices(parse_cluster("2x8:h100"), mesh)
    places = [REPLICATE, Partial("sum"), Shard(0), Shard(0, 1), Shard(1)]
    layouts = [lay for lay in product(places, repeat=2) if valid_layout(lay, dims)][: max(1, pairs // 16)]
    kind = TensorType((8192, 512), "float32")
    table = prices.reshard_table(layouts, layouts, dims, kind, "reshard")
    assert table.tolist() == [[prices.reshard_ns(a, b, dims, kind) for b in layouts] for a in layouts]
