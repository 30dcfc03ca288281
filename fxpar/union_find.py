"""Disjoint sets over 0 .. n-1; the representative is the smallest member, so it does not depend on the order."""

from __future__ import annotations


class UnionFind:
    """``join`` two members' sets; ``find`` the smallest member of a set."""

    def __init__(self, size: int) -> None:
        self._parent = list(range(size))

    def find(self, member: int) -> int:
        parent = self._parent
        while parent[member] != member:
            parent[member] = parent[parent[member]]
            member = parent[member]
        return member

    def join(self, a: int, b: int) -> None:
        a, b = self.find(a), self.find(b)
        if a != b:
            self._parent[max(a, b)] = min(a, b)
