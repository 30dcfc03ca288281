"""Pins as a user writes them: ``PATTERN=WANTED``, what mesh axes shall do to the inputs or ops of a name.

    embed*.weight=tp:Shard(0)          stored cut along dim 0 over axis tp, as it is best over the other axes
    *.bias=Replicate                   stored whole on every axis
    fc.weight=[Replicate, Shard(1)]    one placement per mesh axis, as a DTensor has them
    layers.*.qkv.weight=a1:heads       a1 cuts the logical dim called heads, wherever it lies in the tensor
    layers.*.mlp=tp:Shard(-1)          the result of the module (its last forward op) is cut along its last dim
    layers.*.mlp.up=tp:ffn,dp:batch    the module's forward ops split the loops called ffn and batch
    attention=a1:whole                 a1 leaves every forward op of that name whole
    layers.*.norm1/native_layer_norm=a1:sequence    only the ops of that name in the module

In: text. Out: :class:`Pin`. What a pattern names and whether there is such a choice is for ``fxpar.constraints``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fxpar.plans.errors import FxparError, collect_errors
from fxpar.plans.mesh import Mesh

WAY_OUT = ("write PATTERN=AXIS:PLACEMENT, such as 'layers.*.fc.weight=tp:Shard(0)'; a PLACEMENT is Replicate, "
           "Shard(DIM), Partial (ops only), whole, or the name of a logical dim such as heads")
LONGEST = 1000
"""Characters of a pin: what a plan file holds of it is bounded."""
_WORDS: dict[str, Literal["replicate", "partial", "whole"]] = {
    "Replicate": "replicate", "R": "replicate", "Partial": "partial", "P": "partial", "whole": "whole",
}
_SHARD = re.compile(r"(?:Shard|S)\(\s*(-?[0-9]{1,3})\s*\)")
_DIM_EQUALS = re.compile(r"\(\s*dim\s*=\s*")  # Shard(dim=0), as torch prints it
_NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")


@dataclass(frozen=True)
class Wanted:
    """What one mesh axis shall do: the placement it gives the tensor ("replicate", "shard" along ``dim``, "partial"),
    nothing at all ("whole"), or splitting the logical dim called ``name`` ("split")."""

    kind: Literal["replicate", "shard", "partial", "whole", "split"]
    dim: int = 0
    name: str = ""

    def __str__(self) -> str:
        return {"shard": f"Shard({self.dim})", "split": self.name}.get(self.kind, self.kind.capitalize())


@dataclass(frozen=True)
class Pin:
    """One pin: ``pattern`` as in file names, ``axes`` per wanted placement the axis it is for: a name, a position in
    the mesh (the whole list is then given), or None for every axis."""

    text: str
    pattern: str
    axes: tuple[str | int | None, ...]
    wanted: tuple[Wanted, ...]

    def on(self, mesh: Mesh) -> dict[int, Wanted] | None:
        """Per mesh axis what is wanted of it; None when the mesh has not the axes that the pin names."""
        if self.axes == (None,):
            return dict.fromkeys(range(len(mesh.axes)), self.wanted[0])
        if isinstance(self.axes[0], int):
            return dict(enumerate(self.wanted)) if len(self.wanted) == len(mesh.axes) else None
        names = [axis.name for axis in mesh.axes]
        if not set(self.axes) <= set(names):
            return None
        return {names.index(str(axis)): wanted for axis, wanted in zip(self.axes, self.wanted, strict=True)}


def parse_pins(texts: Sequence[str]) -> tuple[Pin, ...]:
    """Every text as a :class:`Pin`, repeated ones once.

    Raises:
        FxparError: some cannot be read (all are named).
    """
    pins: dict[str, Pin] = {}
    with collect_errors() as errors:
        for text in texts:
            with errors.catching():
                pins[text] = parse_pin(text)
    return tuple(pins.values())


def parse_pin(text: str) -> Pin:
    """One pin.

    Raises:
        FxparError: it is not of the form above, or names an axis twice.
    """
    pattern, equals, right = _DIM_EQUALS.sub("(", text).rpartition("=")
    right, pattern = right.strip(), pattern.strip()
    if not pattern or not right or len(text) > LONGEST:
        raise _unreadable(text, f"it has {len(text)} characters of at most {LONGEST}" if len(text) > LONGEST else
                          "one side of = is empty" if equals else "there is no PATTERN=")
    listed = right.startswith("[") and right.endswith("]")
    parts = [part.strip() for part in (right[1:-1] if listed else right).split(",")]
    axes: list[str | int | None] = []
    wanted = []
    for position, part in enumerate(parts):
        axis, colon, what = part.rpartition(":")
        axis, what = axis.strip(), what.strip()
        if (colon and not _NAME.fullmatch(axis)) or (colon and listed):
            raise _unreadable(text, f"cannot read '{part[:40]}'")
        axes.append(position if listed else axis if colon else None)
        wanted.append(_wanted(what, text))
    if None in axes and len(axes) > 1:
        raise _unreadable(text, "several placements need their axes' names, or the brackets of a list")
    if len(set(axes)) < len(axes):
        raise _unreadable(text, "an axis is named twice")
    return Pin(text, pattern, tuple(axes), tuple(wanted))


def _wanted(text: str, whole: str) -> Wanted:
    shard = _SHARD.fullmatch(text)
    if shard:
        return Wanted("shard", int(shard[1]))
    word = _WORDS.get(text.removesuffix("()"))
    if word is not None:
        return Wanted(word)
    if not _NAME.fullmatch(text):
        raise _unreadable(whole, f"'{text[:40]}' is no placement")
    return Wanted("split", name=text)


def _unreadable(text: str, why: str) -> FxparError:
    return FxparError(f"'{text[:120]}' is not a pin", numbers=why, way_out=WAY_OUT)
