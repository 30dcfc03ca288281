"""Operators of our own (``fxpar::...``), so that a program is device-neutral and its random draws are stateless.

Importing this package registers them with torch; nothing else happens.
"""

from fxpar.rules.ops import attention, hub, random, strided

__all__ = ["attention", "hub", "random", "strided"]
