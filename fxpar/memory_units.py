"""The unit that memory is counted in where plans are chosen."""

MEMORY_UNIT = 64 * 1024
"""Bytes. Sizes are rounded up to it, budgets down.

One unit for every problem: multipliers, digests and budgets of certificates mean the same in all of them. Of a tiny
model it is coarse (each of some hundred values counts up to 64 KiB too much), which costs time and no plans: the row
only steers. What fits is decided by the simulator, to the byte, and the search gives the row as much more than the
limit as it counts too much (``Search._within``); plans of a 6 MB step are found at 28 % of it.
"""


def units(size: int) -> int:
    """Units that hold ``size`` bytes."""
    return -(-size // MEMORY_UNIT)
