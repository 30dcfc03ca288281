"""Operators of our own (``fxpar::...``), so that a program is device-neutral and its random draws are stateless.

Importing this package registers them with torch; nothing else happens.
"""

from fxpar.rules.ops import (
    attention,
    ctc,
    hub,
    log_softmax,
    microbatch,
    place_parts,
    pool_parts,
    random,
    row_parts,
    strided,
)

__all__ = [
    "attention", "ctc", "hub", "log_softmax", "microbatch", "place_parts", "pool_parts", "random", "row_parts",
    "strided",
]
