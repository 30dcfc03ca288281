"""Synthetic problems shaped like training graphs: a chain of layers with skip edges, layouts, modes and parameters.

A state of an activation is (layout, mode) with mode dropped / recomputed / stored; a backward variable and a parameter
have a layout only. Layouts are words over {R, S, P} per mesh axis, resharding costs an amount per differing axis.
"""

from itertools import product

import numpy as np

from fxpar.solver.problem import FORBIDDEN, Edge, Problem, Variable


def layered(blocks, axes=2, seed=0, budget=None, per_block=8, modes=True):
    """`blocks` x `per_block` operations forward, as many backward, a parameter on every other one.

    modes: False leaves out the memory modes of activations. budget: 64 KiB units.
    """
    rng = np.random.default_rng(seed)
    layouts = list(product(range(4), repeat=axes))
    count = len(layouts)
    tables, index, variables, edges = [], {}, [], []
    axis_cost = [10.0 / (1 + 9 * axis) for axis in range(axes)]

    def reshard(size, twice):
        key = (size, twice)
        if key not in index:
            base = np.zeros((count, count), dtype=np.int64)
            for i, a in enumerate(layouts):
                for j, b in enumerate(layouts):
                    moved = [axis for axis in range(axes) if a[axis] != b[axis]]
                    free = all(a[axis] == 0 for axis in moved)
                    base[i, j] = (
                        0
                        if free
                        else sum(
                            8000 + int(size * axis_cost[axis] * (2 if a[axis] == 3 and b[axis] == 0 else 1))
                            for axis in moved
                            if a[axis] != 0
                        )
                    )
                    if any(b[axis] == 3 and a[axis] != 3 for axis in moved):
                        base[i, j] = FORBIDDEN
            tables.append(expand(base, twice))
            index[key] = len(tables) - 1
        return index[key]

    def expand(base, kind):
        if kind == "plain":
            return base
        if kind == "forward":
            barred = base >= FORBIDDEN
            again = np.where(barred, FORBIDDEN, 2 * np.where(barred, 0, base))
            # A dropped operand cannot be recomputed from; a recomputed reader reshards its operand twice.
            grid = [[base, FORBIDDEN, base], [base, again, base], [base, again, base]]
            full = np.empty((3 * count, 3 * count), dtype=np.int64)
            for a in range(3):
                for b in range(3):
                    full[a::3, b::3] = grid[a][b]
            return full
        full = np.empty((3 * count, count), dtype=np.int64)
        full[0::3] = FORBIDDEN
        full[1::3] = base
        full[2::3] = base
        return full

    def states(cost, bytes_, kind):
        costs, memory = [], []
        for layout in layouts:
            share = np.prod([1.0 if s == 0 else 1 / (8 if axis else 4) for axis, s in enumerate(layout)])
            noise = rng.uniform(1.0, 1.3)
            for mode in range(3 if kind == "forward" else 1):
                costs.append(int(cost * share * noise * (2 if kind == "forward" and mode == 1 else 1)))
                held = 0.0 if kind == "backward" or (kind == "forward" and mode == 0) else bytes_ * share
                memory.append(int(np.ceil(held / (8 if kind == "forward" and mode == 1 else 1))))
        return np.array(costs, dtype=np.int64), np.array(memory, dtype=np.int64)

    forward_kind = "forward" if modes else "plain"
    sizes = [int(10 ** rng.uniform(3, 6)) for _ in range(per_block)]
    work = [int(10 ** rng.uniform(4, 7)) for _ in range(per_block)]
    last_forward, residual, forward = None, None, []
    for block in range(blocks):
        for op in range(per_block):
            v = len(variables)
            numbers = states(work[op], sizes[op] // 10, "forward" if modes else "all")
            variables.append(Variable(f"f{block}.{op}", *numbers))
            forward.append((v, op))
            if last_forward is not None:
                edges.append(Edge(last_forward, v, reshard(sizes[op], forward_kind)))
            if op == per_block - 1:
                if residual is not None:
                    edges.append(Edge(residual, v, reshard(sizes[op], forward_kind)))
                residual = v
            last_forward = v
    parameters = {}
    for v, op in forward:
        if op % 2 == 0:
            p = len(variables)
            variables.append(Variable(f"p{v}", *states(0, sizes[op] // 5 * 4, "parameter")))
            parameters[v] = p
            kind = "plain"
            flat = reshard(sizes[op], kind)
            if modes:
                key = ("use", sizes[op])
                if key not in index:
                    tables.append(np.repeat(tables[flat], 3, axis=1))
                    index[key] = len(tables) - 1
                edges.append(Edge(p, v, index[key]))
            else:
                edges.append(Edge(p, v, flat))
    last = None
    for v, op in reversed(forward):
        b = len(variables)
        variables.append(Variable(f"b{v}", *states(2 * work[op], 0, "backward")))
        edges.append(Edge(v, b, reshard(sizes[op], "saved" if modes else "plain")))
        if last is not None:
            edges.append(Edge(last, b, reshard(sizes[op], "plain")))
        if v in parameters:
            edges.append(Edge(b, parameters[v], reshard(2 * sizes[op], "plain"), 2))
        last = b
    return Problem(tuple(variables), tuple(edges), tuple(tables), budget)
