"""States of a priced problem in words: per mesh axis the logical dims that are split.

    batch over a0, ffn over a1; kept              an op: what each axis splits, and what becomes of its result
    whole on a0; made once, kept until backward   a hub: the layout of a copy, and how long it lives
    whole on a0, hidden (dim 1) cut over a1       a parameter: how it is stored
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fxpar.formulate import Formulation
from fxpar.modes import AGAIN, DROPPED, HELD, KEPT
from fxpar.plans.layout import Layout, Partial, Shard
from fxpar.plans.mesh import Mesh
from fxpar.rules.choices import JointChoice
from fxpar.splits import Named, cut_factors


def state_words(formulation: Formulation, named: Named) -> Callable[[int], Sequence[str]]:
    """Per class (a function of its id) the words of every state."""
    first_node = {c: n for n, c in reversed(list(enumerate(formulation.classes.nodes)))}
    first_input = {c: n for n, c in reversed(list(enumerate(formulation.classes.inputs)))}

    def words(c: int) -> list[str]:
        if c in first_input:
            value = formulation.program.inputs[first_input[c]].value
            return [layout_words(s, value, formulation.mesh, named) for s in formulation.input_states[c]]
        modes = formulation.modes.get(c) or formulation.hub_modes.get(c)
        free = modes is not None and len(set(modes)) > 1
        ends = {KEPT: "; kept", AGAIN: "; run again in backward", DROPPED: "; dropped"} if free else {}
        if c in formulation.hub_modes:
            late = formulation.program.nodes[first_node[c]].phase == "backward"
            ends = {
                KEPT: "; made again in backward", AGAIN: "; made again in backward", DROPPED: "; its own in backward",
                HELD: "; the copy that forward made",
            } if late else {
                KEPT: "; made again in backward", AGAIN: "; made again in backward", DROPPED: "; freed after forward",
                HELD: "; made once, kept until backward",
            }
        return [
            choice_words(s, first_node[c], formulation.mesh, named) + (ends.get(modes[i], "") if modes else "")
            for i, s in enumerate(formulation.node_states[c])
        ]

    return words


def choice_words(choice: JointChoice, node: int, mesh: Mesh, named: Named) -> str:
    """What every mesh axis does to an op."""
    numbers = named.classes.of_factor[node]
    parts = []
    for place, (axis, name) in enumerate(zip(mesh.axes, choice.names, strict=True)):
        cut = [named.names[numbers[f]] for f in cut_factors(name) if f < len(numbers)]
        pending = any(isinstance(layout[place], Partial) for layout in choice.outputs if layout)
        if cut:
            parts.append(f"{'·'.join(cut)} over {axis.name}{' (sum pending)' if pending else ''}")
        elif name.startswith("p"):
            operands = [str(o) for o, layout in enumerate(choice.inputs) if isinstance(layout[place], Partial)]
            parts.append(f"pending sum of operand {' and '.join(operands)} passes on {axis.name}")
        elif name == ".":
            parts.append(f"whole on {axis.name}")
        else:
            parts.append(f"{name} on {axis.name}")
    return ", ".join(parts)


def layout_words(layout: Layout, value: int, mesh: Mesh, named: Named) -> str:
    """How a stored tensor lies on every mesh axis."""
    parts = []
    for axis, placement in zip(mesh.axes, layout, strict=True):
        if isinstance(placement, Shard):
            atoms = named.classes.of_atom[value][placement.dim][placement.first : placement.first + placement.length]
            names = "·".join(named.names[c] for c in atoms)
            parts.append(f"{names} (dim {placement.dim}) cut over {axis.name}")
        else:
            parts.append(f"whole on {axis.name}")
    return ", ".join(parts)
