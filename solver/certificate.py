"""A lower bound that anyone can check: one vector of payments per linked pair, and the price of memory.

Of two linked variables the second pays and the first is paid. If state y of the second pays a[y] into their link, the
link can pay state x of the first

    paid[x] = min_y (table[x, y] + a[y])

and still lose nothing, because table[x, y] >= paid[x] - a[y] for every pair. So for every assignment within the budget

    cost  >=  sum_v (costs_v - what v pays + what v is paid + multiplier * memory_v)[x_v]  -  multiplier * budget
          >=  sum_v min_x (...)                                                            -  multiplier * budget

whatever the payments are. Checking takes one pass over the tables: no search, no trust in how the payments were found.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from fxpar.solver.arcs import Arcs, all_states, arc_consistent
from fxpar.solver.graph import BIG, Graph, IntArray, merge, restrict
from fxpar.solver.min_plus import equal_rows
from fxpar.solver.problem import Problem

#: Payments at or above this (ns) are refused: sums of them must not overflow.
LARGEST_PAYMENT: int = 2**45
#: Links that one variable may have.
MOST_LINKS: int = 2**16


@dataclass(frozen=True)
class Proof:
    """What a bound rests on.

    multiplier  ns per memory unit, the price of memory, >= 0.
    quantum     ns, the unit of all payments, >= 1.
    payments    for every link of :func:`checkable_graph`, in order: what the states of its second end pay into it, a
                count of quanta >= 0 per distinct column of its table, in order of first appearance.
    """

    multiplier: Fraction
    quantum: int
    payments: tuple[tuple[int, ...], ...]


def checkable_graph(problem: Problem) -> Graph | None:
    """The problem with parallel edges joined, without states that no neighbour can accompany, and without pairs whose
    cost is a sum of one term per end; None if no state is left somewhere. Made without search."""
    whole = merge(problem)
    live = arc_consistent(Arcs(whole), all_states(whole))
    return None if live is None else restrict(whole, live)


def proven_bound(problem: Problem, proof: Proof) -> int:
    """The bound in ns that a proof proves: no assignment within the budget costs less.

    Raises ValueError when the proof is not one of this problem (another number of links or of amounts) or holds a
    number out of range.
    """
    graph = checkable_graph(problem)
    if graph is None:
        raise ValueError("no assignment avoids the forbidden pairs: there is nothing to bound")
    return bound_of(graph, proof)


def bound_of(graph: Graph, proof: Proof, known_kinds: dict[int, IntArray] | None = None) -> int:
    """:func:`proven_bound` of the problem's :func:`checkable_graph`.

    known_kinds: per table its :func:`distinct_columns`, if they are there already; filled in.
    """
    if len(proof.payments) != len(graph.links):
        raise ValueError(f"payments for {len(proof.payments)} linked pairs, the problem has {len(graph.links)}")
    if proof.quantum < 1 or proof.multiplier < 0:
        raise ValueError(f"quantum {proof.quantum} and multiplier {proof.multiplier} are not of a proof")
    if max((len(around) for around in graph.links_of), default=0) > MOST_LINKS:
        raise ValueError(f"a variable has more than {MOST_LINKS} links")
    totals = priced(graph, proof.multiplier)
    kinds = {} if known_kinds is None else known_kinds
    for link, amounts in zip(graph.links, proof.payments, strict=True):
        table = graph.tables[link.table]
        if link.table not in kinds:
            kinds[link.table] = distinct_columns(table)
        paying = _amounts(amounts, kinds[link.table], proof.quantum)
        paid = (table + paying).min(axis=1)
        totals[link.v] = totals[link.v] - paying
        # capped from above only, which never raises the bound: sums of forbidden entries must not overflow
        totals[link.u] = np.minimum(totals[link.u] + paid, BIG)
    bound = graph.constant + sum(int(total.min()) for total in totals)
    return bound - (0 if graph.budget is None else ceiling(proof.multiplier * graph.budget))


def priced(graph: Graph, multiplier: Fraction) -> list[IntArray]:
    """Cost plus the price of memory of every state, in ns, rounded down. ValueError when a price overflows."""
    if not multiplier or graph.budget is None:
        return list(graph.costs)
    most = max((int(memory.max()) for memory in graph.memory), default=0)
    if most * multiplier.numerator >= 2**62 or multiplier.denominator >= 2**62 or most * multiplier >= 2**55:
        raise ValueError(f"the multiplier {multiplier} is too large for the problem")
    return [
        costs + (memory * multiplier.numerator) // multiplier.denominator
        for costs, memory in zip(graph.costs, graph.memory, strict=True)
    ]


def distinct_columns(table: IntArray) -> IntArray:
    """Per column the number of its kind: equal columns are of one kind, numbered by first appearance."""
    return equal_rows(table.T)[1]


def ceiling(value: Fraction) -> int:
    """The smallest whole number that is not below."""
    return -(-value.numerator // value.denominator)


def _amounts(amounts: tuple[int, ...], kinds: IntArray, quantum: int) -> IntArray:
    """Per state of the payer what it pays, ns."""
    count = int(kinds.max()) + 1
    if len(amounts) != count:
        raise ValueError(f"{len(amounts)} amounts for a pair that tells {count} kinds of states apart")
    if min(amounts) < 0 or max(amounts) * quantum >= LARGEST_PAYMENT:
        raise ValueError("an amount is out of range")
    return np.array(amounts, dtype=np.int64)[kinds] * quantum


def payments_of(
    graph: Graph, paying: Sequence[IntArray], quantum: int, known_kinds: dict[int, IntArray] | None = None
) -> tuple[tuple[int, ...], ...]:
    """The payments of a proof from one vector in ns [states of v] per link.

    States that the table does not tell apart pay the least that one of them would: the receiver is paid the same, and
    they keep more. A constant moved from a link to its payer changes nothing, so the least amount is 0.
    """
    kinds = {} if known_kinds is None else known_kinds
    payments = []
    for link, vector in zip(graph.links, paying, strict=True):
        if link.table not in kinds:
            kinds[link.table] = distinct_columns(graph.tables[link.table])
        kind = kinds[link.table]
        least = np.full(int(kind.max()) + 1, np.iinfo(np.int64).max)
        np.minimum.at(least, kind, vector)
        amounts = np.minimum((least - least.min()) // quantum, (LARGEST_PAYMENT - 1) // quantum)
        payments.append(tuple(amounts.tolist()))
    return tuple(payments)


def problem_digest(problem: Problem) -> str:
    """sha256 of every number of a problem; names are not part of it."""
    digest = hashlib.sha256()

    def add(*numbers: int) -> None:
        digest.update(np.array(numbers, dtype="<i8").tobytes())

    add(len(problem.variables), len(problem.edges), len(problem.tables))
    add(-1 if problem.budget is None else problem.budget)
    for variable in problem.variables:
        add(variable.states)
        digest.update(variable.costs.astype("<i8").tobytes())
        digest.update(variable.memory.astype("<i8").tobytes())
    for edge in problem.edges:
        add(edge.u, edge.v, edge.table, edge.weight)
    for table in problem.tables:
        add(*table.shape)
        digest.update(np.ascontiguousarray(table, dtype="<i8").tobytes())
    return digest.hexdigest()
