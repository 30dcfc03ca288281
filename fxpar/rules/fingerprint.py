"""A digest of the rule set: a plan runs only under the rules it was made with."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable


@cache
def rules_digest() -> str:
    """sha256 over the sources of this package (rules, engine and fxpar's own ops), file by file in name order."""
    digest = hashlib.sha256()
    for name, text in sorted(_sources(files("fxpar.rules"), "")):
        digest.update(f"{name}\n{len(text)}\n".encode())
        digest.update(text)
    return digest.hexdigest()


def _sources(folder: Traversable, prefix: str) -> list[tuple[str, bytes]]:
    found = []
    for entry in folder.iterdir():
        if entry.is_dir() and entry.name != "__pycache__":
            found += _sources(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(".py"):
            found.append((prefix + entry.name, entry.read_bytes()))
    return found
