"""Digests of the rules: a plan runs only under the user's rules it was made with."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from fxpar.rules.registry import rule_for


def rules_digest(ops: Iterable[str] = ()) -> str:
    """What decides about choices: fxpar's rules, and after a ``+`` the user's rules of these ops if there are any."""
    own = user_rules_digest(ops)
    return f"{package_digest()}+{own}" if own else package_digest()


def user_rules_digest(ops: Iterable[str]) -> str:
    """sha256 over the rules that the user declared for these ops; empty when there are none."""
    said = [(op, rule.declared) for op in sorted(set(ops)) if (rule := rule_for(op)) is not None and rule.declared]
    return hashlib.sha256(repr(said).encode()).hexdigest() if said else ""


@cache
def package_digest() -> str:
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
