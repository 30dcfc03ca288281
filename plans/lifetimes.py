"""How long a gathered copy lives: made anew for each half of the step, or kept from forward to backward.

A value that both halves read has a hub in each. A backward hub in ``Decisions.reuse`` reads the copy that the forward
hub of the same value made; nothing is resharded for it in backward:

    own:    w ──▶ hub (gather) ──▶ forward        reuse:  w ──▶ hub (gather) ──▶ forward
            w ──▶ hub (gather) ──▶ backward                         └──────────▶ backward
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from fxpar.plans.plan import Decisions
from fxpar.plans.program import Node, Program, node_inputs

HUB = "fxpar.hub.default"
# ops between a stored weight and the product that uses it
_CARRIES_WEIGHT = frozenset({
    "fxpar.hub.default", "aten.t.default", "aten.transpose.int", "aten.view.default", "aten._unsafe_view.default",
    "aten.detach.default", "aten.alias.default", "aten._to_copy.default", "aten.permute.default", "aten.expand.default",
    "aten.unsqueeze.default", "aten.clone.default",
})


def hub_partners(program: Program) -> dict[int, int]:
    """Backward hub -> the forward hub of the same value (node indices), where there is one."""
    forward: dict[int, int] = {}
    partners: dict[int, int] = {}
    for index, node in enumerate(program.nodes):
        if _is_hub(node):
            value = node_inputs(node)[0]
            if node.phase == "forward":
                forward.setdefault(value, index)
            elif value in forward:
                partners[index] = forward[value]
    return partners


def parameter_hubs(program: Program) -> dict[int, int]:
    """:func:`hub_partners` of values that are a parameter, seen through views and casts."""
    roots = parameter_roots(program)
    return {b: f for b, f in hub_partners(program).items() if node_inputs(program.nodes[f])[0] in roots}


def parameter_roots(program: Program) -> dict[int, int]:
    """Values that are a parameter seen through views and casts -> the parameter's value."""
    roots = {i.value: i.value for i in program.inputs if i.kind == "parameter"}
    for node in program.nodes:
        if node.op in _CARRIES_WEIGHT and node.outputs and node_inputs(node) and node_inputs(node)[0] in roots:
            roots[node.outputs[0]] = roots[node_inputs(node)[0]]
    return roots


def _is_hub(node: Node) -> bool:
    return node.op == HUB and len(node_inputs(node)) == 1 and len(node.outputs) == 1 and node.outputs[0] >= 0


def reuse_problems(program: Program, decisions: Decisions) -> Iterator[str]:
    """Every way in which ``decisions.reuse`` cannot be run; ``choices`` has one entry per node."""
    if not decisions.reuse:
        return
    if list(decisions.reuse) != sorted(set(decisions.reuse)):
        yield f"reuse is not in order, or names a node twice: {decisions.reuse[:8]}"
    partners, again = hub_partners(program), frozenset(decisions.recompute)
    for index in decisions.reuse:
        if not 0 <= index < len(program.nodes):
            yield f"reuse names node {index} of {len(program.nodes)}"
            continue
        node = program.nodes[index]
        name = f"node {index} ({node.op} at {node.module or '(model)'})"
        if node.op != HUB or node.phase != "backward":
            yield f"reuse names {name}, which is no backward hub"
        elif index not in partners:
            yield f"reuse names {name}, whose value has no hub in forward"
        elif decisions.choices[index] != decisions.choices[partners[index]]:
            yield (f"{name} reuses the copy of node {partners[index]}, which is laid out "
                   f"{' '.join(decisions.choices[partners[index]])}, not {' '.join(decisions.choices[index])}")
        elif partners[index] in again:
            yield f"recompute names node {partners[index]}, whose copy node {index} reuses"


def keep_copies(program: Program, decisions: Decisions, hubs: Iterable[int]) -> Decisions:
    """``decisions`` in which the backward ``hubs`` that have a partner reuse its copy: they take the partner's layout,
    and the partner no longer runs again."""
    partners = hub_partners(program)
    reuse = tuple(sorted(set(hubs) & partners.keys()))
    choices = list(decisions.choices)
    for index in reuse:
        choices[index] = choices[partners[index]]
    kept = {partners[index] for index in reuse}
    again = tuple(n for n in decisions.recompute if n not in kept)
    return msgspec.structs.replace(decisions, choices=tuple(choices), recompute=again, reuse=reuse)
