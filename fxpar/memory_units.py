"""The unit that memory is counted in where plans are chosen."""

MEMORY_UNIT = 64 * 1024
"""Bytes. Sizes are rounded up to it, budgets down."""
STEPS = 2**14
"""Units that a budget has at least, where that makes the unit smaller than :data:`MEMORY_UNIT`."""
LEAST_UNIT = 64


def units(size: int, unit: int = MEMORY_UNIT) -> int:
    """Units that hold ``size`` bytes."""
    return -(-size // unit)


def unit_for(budget: int) -> int:
    """The unit of problems within ``budget`` bytes: a power of two, 64 KiB from 1 GiB on.

    Each of some hundred values is rounded up, so that of a budget of a few MiB 64 KiB units would count nothing but
    roundings.
    """
    return min(MEMORY_UNIT, max(LEAST_UNIT, 1 << max(budget // STEPS, 1).bit_length() - 1))
