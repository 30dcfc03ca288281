"""The loss before its last rounding, so that its shares can be added up."""

from __future__ import annotations

from collections import Counter

import msgspec

from fxpar.plans.program import Program, node_inputs

CAST = "aten._to_copy.default"


def with_wide_loss(program: Program) -> Program:
    """The program whose loss is the number before its last rounding, where the model rounds it (cross entropy of
    bfloat16 logits): shares of a loss are added up as they are computed, not as they are rounded."""
    reads = Counter(v for node in program.nodes for v in node_inputs(node))
    for position, output in enumerate(program.outputs):
        if output.kind == "loss":
            node = next((n for n in program.nodes if output.value in n.outputs), None)
            if node is not None and node.op == CAST and not reads[output.value]:
                before = node_inputs(node)[0]
                if program.types[before].dtype in ("float32", "float64"):
                    outputs = list(program.outputs)
                    outputs[position] = msgspec.structs.replace(output, value=before)
                    nodes = tuple(n for n in program.nodes if n is not node)
                    return msgspec.structs.replace(program, outputs=tuple(outputs), nodes=nodes)
    return program
