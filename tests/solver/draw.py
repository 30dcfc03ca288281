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


@st.composite
def staged_problems(draw, most_steps=4):
    """A chain run forward and back: every forward value is dropped, recomputed or kept in one of a few layouts.

    Backward reads what was kept or is recomputed (dropped: forbidden); what is recomputed needs an operand that is not
    dropped; a parameter that all steps use has a lifetime of its own. Keeping takes memory, and the budget is drawn.
    """
    steps = draw(st.integers(1, most_steps))
    layouts = draw(st.integers(1, 2))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    modes = ("dropped", "recomputed", "kept")
    states = [(lay, mode) for lay in range(layouts) for mode in modes]
    rows = {mode: np.array([m == mode for _, m in states]) for mode in modes}
    variables, tables, edges = [], [], []
    for step in range(steps):
        work = rng.integers(1, 100)
        costs = np.array([work * (2 if mode == "recomputed" else 1) for _, mode in states], np.int64)
        size = rng.integers(1, 20)
        memory = np.array([size * (mode == "kept") for _, mode in states], np.int64)
        variables.append(Variable(f"forward {step}", costs, memory))
    moves = rng.integers(0, 50, (layouts, layouts))
    between = np.array([[moves[a, b] * (2 if m == "recomputed" else 1) for b, m in states] for a, _ in states])
    between[np.ix_(rows["dropped"], rows["recomputed"])] = FORBIDDEN
    tables.append(between)
    back = np.array([[moves[a, b] for b in range(layouts)] for a, _ in states])
    back[rows["dropped"]] = FORBIDDEN
    tables.append(back)
    edges += [Edge(step, step + 1, 0) for step in range(steps - 1)]
    for step in range(steps):
        variables.append(Variable(f"backward {step}", rng.integers(0, 50, layouts), np.zeros(layouts, np.int64)))
        edges.append(Edge(step, steps + step, 1))
    lifetimes = draw(st.integers(1, 3))
    memory = np.sort(rng.integers(0, 30, lifetimes))
    variables.append(Variable("parameter", np.zeros(lifetimes, np.int64), memory))
    tables.append(rng.integers(0, 30, (lifetimes, layouts)) * (lifetimes - np.arange(lifetimes))[:, None])
    edges += [Edge(2 * steps, steps + step, 2, draw(st.integers(1, 3))) for step in range(steps)]
    most = sum(int(variable.memory.max()) for variable in variables)
    budget = draw(st.none() | st.integers(0, most))
    return Problem(tuple(variables), tuple(edges), tuple(tables), budget)
