"""The unit that memory is counted in where plans are chosen."""

MEMORY_UNIT = 64 * 1024
"""Bytes. Sizes are rounded up to it, budgets down."""


def units(size: int) -> int:
    """Units that hold ``size`` bytes."""
    return -(-size // MEMORY_UNIT)
