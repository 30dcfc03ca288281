"""States that cannot be, or need not be, part of a best assignment.

`arc_consistent` removes states that no neighbour's state can accompany. `undominated` removes states that another
state of the same variable replaces at no more cost and no more memory, whatever the neighbours do (dead-end
elimination: Goldstein, "Efficient rotamer elimination applied to protein side-chains", 1994).
"""

from collections import deque
from collections.abc import Sequence

import numpy as np

from fxpar.solver.graph import BIG, BLOCKED, BoolArray, Graph, IntArray
from fxpar.solver.min_plus import core_of

#: Comparing states pairwise costs rows^2 x columns per distinct table; above this many steps a table is left alone,
#: and the variables at its ends with it.
COMPARISONS_PER_TABLE = 2_000_000
COMPARISONS_IN_ALL = 150_000_000


def all_states(graph: Graph) -> list[BoolArray]:
    """The live masks with every state live whose own cost is not forbidden."""
    return [costs < BLOCKED for costs in graph.costs]


class Arcs:
    """The forbidden pairs of a graph, made once for many calls of `arc_consistent`."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.allowed: list[BoolArray | None] = []
        for table in graph.tables:
            allowed = table < BLOCKED
            self.allowed.append(None if allowed.all() else allowed)
        self.links_of: list[list[int]] = [
            [each for each in around if self.allowed[graph.links[each].table] is not None] for around in graph.links_of
        ]

    def supported(self, link: int, end: int, live: Sequence[BoolArray]) -> BoolArray:
        """Which states of variable `end` some live state at the other end of `link` can accompany."""
        u, v, table = self.graph.links[link].u, self.graph.links[link].v, self.graph.links[link].table
        allowed = self.allowed[table]
        assert allowed is not None
        across = allowed[:, live[v]] if end == u else allowed[live[u]].T
        return np.asarray(across.any(axis=1))

    def assign(self, live: list[BoolArray], v: int, state: int, decided: list[bool]) -> bool:
        """Leaves `state` alone live at v and propagates. False if some variable loses its last state.

        Marks v in `decided`; variables assigned before need no second look, as all that is left fits them.
        """
        decided[v] = True
        live[v] = np.arange(len(live[v])) == state
        changed = []
        for link in self.links_of[v]:
            ends = self.graph.links[link]
            allowed = self.allowed[ends.table]
            assert allowed is not None
            other, row = (ends.v, allowed[state]) if ends.u == v else (ends.u, allowed[:, state])
            if decided[other]:
                continue
            smaller = live[other] & row
            if (smaller != live[other]).any():
                live[other] = smaller
                changed.append(other)
                if not smaller.any():
                    return False
        return self.propagate(live, changed, decided) is None

    def propagate(
        self, live: list[BoolArray], changed: Sequence[int], decided: Sequence[bool] | None = None
    ) -> int | None:
        """Removes unsupported states from `live` (arrays are replaced, not written to), starting at `changed`.

        Returns the variable that lost its last state, or None.
        """
        queue = deque(changed)
        queued = [False] * self.graph.size
        for v in changed:
            queued[v] = True
        while queue:
            v = queue.popleft()
            queued[v] = False
            for link in self.links_of[v]:
                ends = self.graph.links[link]
                other = ends.v if ends.u == v else ends.u
                if decided is not None and decided[other]:
                    continue
                smaller = live[other] & self.supported(link, other, live)
                if (smaller == live[other]).all():
                    continue
                live[other] = smaller
                if not smaller.any():
                    return other
                if not queued[other]:
                    queued[other] = True
                    queue.append(other)
        return None


def arc_consistent(arcs: Arcs, live: Sequence[BoolArray]) -> list[BoolArray] | None:
    """The largest arc consistent subset of `live`, or None if a variable loses all its states."""
    smaller = list(live)
    if not all(mask.any() for mask in smaller):
        return None
    changed = [v for v in range(arcs.graph.size) if arcs.links_of[v]]
    return None if arcs.propagate(smaller, changed) is not None else smaller


def undominated(graph: Graph, live: Sequence[BoolArray], binding: bool) -> list[BoolArray]:
    """`live` (arc consistent) without states another state replaces for free. At least one best assignment survives.

    `binding`: whether the memory row matters; if not, memory is not compared.
    """
    result = list(live)
    known: dict[tuple[int, bool, bytes], IntArray | None] = {}
    cores: dict[int, tuple[IntArray, IntArray, IntArray]] = {}
    work = COMPARISONS_IN_ALL
    todo = deque(range(graph.size))
    queued = [True] * graph.size
    while todo and work > 0:
        v = todo.popleft()
        queued[v] = False
        kept = np.flatnonzero(result[v])
        if len(kept) < 2:
            continue
        excess: IntArray | None = graph.costs[v][kept][:, None] - graph.costs[v][kept][None, :]
        for position in graph.links_of[v]:
            link = graph.links[position]
            first = link.u == v
            other = link.v if first else link.u
            if link.table not in cores:
                cores[link.table] = core_of(graph.tables[link.table])
            core, row_of, column_of = cores[link.table]
            if not first:
                core, row_of, column_of = core.T, column_of, row_of
            across = np.bincount(column_of[result[other]], minlength=core.shape[1]) > 0
            key = (link.table, first, np.packbits(across).tobytes())
            if key not in known:
                known[key], spent = _excess_of_rows(core[:, across])
                work -= spent
            ours = known[key]
            if ours is None or excess is None:
                excess = None
                break
            mine = row_of[kept]
            excess = np.minimum(excess + ours[np.ix_(mine, mine)], BIG)
        if excess is None:
            continue
        replaces = excess <= 0
        if binding:
            memory = graph.memory[v][kept]
            replaces &= memory[:, None] <= memory[None, :]
        # Of states that replace each other the first stays.
        mutual = replaces & replaces.T
        replaces &= ~(mutual & np.tri(len(kept), dtype=bool))
        gone = replaces.any(axis=0)
        if gone.any():
            mask = result[v].copy()
            mask[kept[gone]] = False
            result[v] = mask
            for position in graph.links_of[v]:
                link = graph.links[position]
                other = link.v if link.u == v else link.u
                if not queued[other]:
                    queued[other] = True
                    todo.append(other)
    return result


def _excess_of_rows(table: IntArray) -> tuple[IntArray | None, int]:
    """[b, a] = the most that row b can cost beyond row a in one column, and the steps this took (None: too many)."""
    rows, inverse, _ = core_of(table)
    steps = rows.shape[0] ** 2 * rows.shape[1]
    if steps > COMPARISONS_PER_TABLE:
        return None, table.size
    # Where a is forbidden nothing is lost by replacing it; where only b is, everything is.
    replaced = np.where(rows >= BLOCKED, 2 * BIG, rows)
    most = (rows[:, None, :] - replaced[None, :, :]).max(axis=2)
    most[most >= BLOCKED] = BIG
    most[most <= -BLOCKED] = -BIG
    return most[np.ix_(inverse, inverse)], steps + table.size
