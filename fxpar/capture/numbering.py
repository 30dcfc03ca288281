"""Numbering: random ops get the program's seed and an op id each, values their final order."""

from __future__ import annotations

import msgspec

from fxpar.plans.program import Arg, Input, Node, Program, Ref, TensorType, map_refs

# Position of (seed, op id) among the arguments, and of the dropout probability where it decides if there is a draw.
DRAWS = {
    "fxpar.dropout.default": (1, 3, None),
    "fxpar.uniform.default": (1, 2, None),
    "fxpar.normal.default": (1, 2, None),
    "fxpar.attention.default": (4, 9, 5),
    "fxpar.attention_backward.default": (7, 12, 8),
}
_LSE_OF_BACKWARD = 6


def replaced(args: tuple[Arg, ...], changes: dict[int, Arg]) -> tuple[Arg, ...]:
    return tuple(changes.get(position, arg) for position, arg in enumerate(args))


def number_draws(program: Program) -> Program:
    """Every random op reads the one seed input and has an op id of its own, in node order.

    An attention's backward has its forward's id, found through ``lse``.
    """
    seed = len(program.types)
    id_of_lse: dict[int, int] = {}
    nodes: list[Node] = []
    next_id = 0
    for node in program.nodes:
        if node.op not in DRAWS:
            nodes.append(node)
            continue
        seed_at, id_at, probability_at = DRAWS[node.op]
        draws = probability_at is None or node.args[probability_at] != 0.0
        op_id: int = 0
        if draws:
            if node.op == "fxpar.attention_backward.default":
                lse = node.args[_LSE_OF_BACKWARD]
                op_id = id_of_lse[lse.id] if isinstance(lse, Ref) else 0
            else:
                op_id, next_id = next_id, next_id + 1
                if node.op == "fxpar.attention.default":
                    id_of_lse[node.outputs[1]] = op_id
        changes: dict[int, Arg] = {seed_at: Ref(seed) if draws else None, id_at: op_id}
        nodes.append(msgspec.structs.replace(node, args=replaced(node.args, changes)))
    if not next_id:
        return msgspec.structs.replace(program, nodes=tuple(nodes))
    return msgspec.structs.replace(
        program,
        types=(*program.types, TensorType((), "int64")),
        inputs=(*program.inputs, Input(seed, "seed", "seed")),
        nodes=tuple(nodes),
    )


def renumber(program: Program) -> Program:
    """Values in definition order: inputs, then node results; unused ids dropped."""
    new: dict[int, int] = {-1: -1}
    types: list[TensorType] = []

    def define(value: int) -> None:
        if value >= 0:
            new[value] = len(types)
            types.append(program.types[value])

    for entry in program.inputs:
        define(entry.value)
    for node in program.nodes:
        for value in node.outputs:
            define(value)
    mapping: dict[int, Arg] = {old: Ref(value) for old, value in new.items()}
    return msgspec.structs.replace(
        program,
        types=tuple(types),
        inputs=tuple(msgspec.structs.replace(entry, value=new[entry.value]) for entry in program.inputs),
        nodes=tuple(
            msgspec.structs.replace(
                node,
                args=tuple(map_refs(arg, mapping) for arg in node.args),
                outputs=tuple(new[value] for value in node.outputs),
            )
            for node in program.nodes
        ),
        outputs=tuple(msgspec.structs.replace(output, value=new[output.value]) for output in program.outputs),
    )
