"""Hypothesis strategies and synthetic problems for the solver tests."""

import numpy as np
from hypothesis import strategies as st

from fxpar.solver.problem import FORBIDDEN, Edge, Problem, Variable


@st.composite
def problems(draw, most_variables=6, most_states=4, budgets=True, barred=True):
    """Small problems: any pairs, parallel edges, forbidden states and pairs, with or without a memory row."""
    count = draw(st.integers(1, most_variables))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sizes = [draw(st.integers(1, most_states)) for _ in range(count)]
    scale = draw(st.sampled_from([1, 5, 1000, 10**8]))
    density = draw(st.sampled_from([0.0, 0.1, 0.3, 0.6])) if barred else 0.0

    def bar(values):
        return np.where(rng.random(values.shape) < density, FORBIDDEN, values)

    variables = []
    for v, size in enumerate(sizes):
        costs = rng.integers(0, 5 * scale + 1, size)
        if density and rng.random() < 0.2:
            costs = bar(costs)
        variables.append(Variable(f"v{v}", costs, rng.integers(0, draw(st.sampled_from([2, 10, 1000])), size)))
    tables, edges = [], []
    if count > 1:
        for _ in range(draw(st.integers(0, 2 * count))):
            u = draw(st.integers(0, count - 1))
            v = draw(st.integers(0, count - 2))
            v += v >= u
            same = [t for t, table in enumerate(tables) if table.shape == (sizes[u], sizes[v])]
            if same and draw(st.booleans()):
                table = same[-1]
            else:
                table = len(tables)
                tables.append(bar(rng.integers(0, 3 * scale + 1, (sizes[u], sizes[v]))))
            edges.append(Edge(u, v, table, draw(st.integers(1, 4))))
    budget = None
    if budgets and draw(st.booleans()):
        least = sum(int(variable.memory.min()) for variable in variables)
        most = sum(int(variable.memory.max()) for variable in variables)
        budget = draw(st.integers(max(least - 2, 0), most))
    return Problem(tuple(variables), tuple(edges), tuple(tables), budget)
