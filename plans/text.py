"""A plan as canonical text: every field, one fact a line, the same text for the same plan; made for diff and review."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterator

from fxpar.plans.layout import Dims, layout_text
from fxpar.plans.plan import Plan, Prediction, Proof
from fxpar.plans.program import Arg, Dtype, Ref


def canonical_text(plan: Plan) -> str:
    """The whole plan as lines; ends with a newline."""
    return "\n".join(text_lines(plan)) + "\n"


def diff_text(old: Plan, new: Plan, old_name: str, new_name: str) -> str:
    """A unified diff of two plans' canonical texts, empty when they are equal."""
    lines = difflib.unified_diff(list(text_lines(old)), list(text_lines(new)), old_name, new_name, lineterm="")
    return "\n".join(lines)


def text_lines(plan: Plan) -> Iterator[str]:
    """The lines of :func:`canonical_text`."""
    program, decisions = plan.program, plan.decisions
    yield f"mesh {decisions.mesh}"
    yield f"cluster {plan.cluster}"
    yield f"memory {plan.memory_bytes} reserved {plan.reserve_bytes}"
    yield from _prediction(plan.prediction, "")
    c = plan.certificate
    yield f"certificate {c.status} cost {c.cost_ns} bound {c.bound_ns} gap {c.gap!r} everywhere {c.everywhere_ns}"
    if c.question is not None:
        q = c.question
        yield (f"  question roles {q.roles} parameters cut {q.parameters_cut} batch dim {q.batch_dim} "
               f"recompute free {q.recompute_free} reuse {q.reuse} budget {q.budget_units} units of {q.memory_unit} "
               f"digest {q.digest!r}")
        yield f"  optimizer bytes {' '.join(map(str, q.optimizer_bytes))}"
        yield f"  rates {q.rates!r}"
        if q.zero is not None:
            yield f"  zero {q.zero}"
        for pin in q.pins:
            yield f"  pin {pin!r}"
        if q.temporaries:
            yield f"  temporaries {' '.join(map(str, q.temporaries))}"
    if c.proof is not None:
        yield f"  proof {_proof(c.proof)}"
    if c.overlap is not None:
        yield f"  any overlap, {c.overlap.compute_quarters} of 4 compute: proof {_proof(c.overlap.proof)}"
    for candidate in plan.candidates:
        yield f"candidate {candidate.name!r} mesh {candidate.mesh} fits {candidate.fits} {candidate.note}".rstrip()
        if candidate.prediction is not None:
            yield from _prediction(candidate.prediction, "  ")
    f = plan.fingerprint
    yield f"fingerprint program {f.program} rules {f.rules} torch {f.torch} fxpar {f.fxpar}"
    for name, digest in f.modules:
        yield f"module {name} {digest}"
    for key, value in plan.provenance:
        yield f"made {key}: {value}"
    for path, value in program.baked:
        yield f"baked {path} = {value}"
    for constant in program.constants:
        yield f"constant {constant.type.dtype}{list(constant.type.shape)} {constant.data.hex()}"
    yield f"call ({', '.join(program.call)})"
    yield f"structure {_arg(program.structure)}"
    if program.time is not None:
        yield f"{program.time.count} microbatches, {program.time.semantics}"
    if decisions.pipeline is not None:
        pipeline = decisions.pipeline
        yield f"stages on axis {pipeline.axis} cut before nodes {' '.join(map(str, pipeline.cuts))}"
        yield f"schedule {pipeline.schedule.name!r} of {pipeline.schedule.microbatches} microbatches"
        for rank, row in enumerate(pipeline.schedule.ranks):
            yield f"  rank {rank}: {' '.join(row)}"
    held, cuts = set(decisions.held), program.time.inputs if program.time is not None else (-1,) * len(program.inputs)
    for position, (item, layout) in enumerate(zip(program.inputs, decisions.inputs, strict=True)):
        ties = f" ties {','.join(item.ties)}" if item.ties else ""
        grad = " trained" if item.requires_grad else ""
        kept = "" if item.persistent else " not-in-state-dict"
        yield (f"v{item.value} = {item.kind} {item.name} {_type(plan, item.value)} stored {layout_text(layout)}"
               f"{grad}{kept}{' held' if position in held else ''}"
               f"{f' cut in time along {cuts[position]}' if cuts[position] >= 0 else ''}{ties}")
    again, reused = set(decisions.recompute), set(decisions.reuse)
    once = set(program.time.once) if program.time is not None else set()
    for index, (node, choice) in enumerate(zip(program.nodes, decisions.choices, strict=True)):
        outputs = ", ".join("_" if v < 0 else f"v{v} {_type(plan, v)}" for v in node.outputs)
        repeated = " recomputed" if index in again else " kept from forward" if index in reused else ""
        yield (f"{outputs} = {node.op}({', '.join(_arg(a) for a in node.args)}) [{' '.join(choice)}] {node.phase}"
               f"{repeated}{' once' if index in once else ''}  # {node.module} {node.source}".rstrip())
    each = set(decisions.reduce_each)
    joins = program.time.outputs if program.time is not None else ("",) * len(program.outputs)
    for position, (output, layout) in enumerate(zip(program.outputs, decisions.outputs, strict=True)):
        join = "" if joins[position] == "" else f" over microbatches: {joins[position]}"
        yield (f"{output.kind} {output.name} = v{output.value} {layout_text(layout)}{join}"
               f"{', reduced by each' if position in each else ''}")


def _prediction(p: Prediction, indent: str) -> Iterator[str]:
    yield (f"{indent}simulated step {p.step_ns} compute {p.compute_ns} communication {p.communication_ns} "
           f"exposed {p.exposed_ns} ns")
    yield (f"{indent}memory peak {p.peak_bytes} parameters {p.parameter_bytes} gradients {p.gradient_bytes} "
           f"optimizer {p.optimizer_bytes} activations {p.activation_bytes} bytes")
    for c in p.collectives:
        yield f"{indent}collective {c.kind} on {c.axis} count {c.count} bytes {c.bytes} ns {c.ns}"


def _proof(proof: Proof) -> str:
    """A proof's numbers; its payments, tens of thousands, by their sha256."""
    payments = hashlib.sha256(repr((proof.vectors, proof.links)).encode()).hexdigest()
    numerator, denominator = proof.multiplier
    return (f"bound {proof.bound_ns} memory {numerator}/{denominator} ns per unit quantum {proof.quantum_ns} "
            f"pairs {len(proof.links)} payments {payments}")


def _type(plan: Plan, value: int) -> str:
    kind = plan.program.types[value]
    return f"{kind.dtype}[{', '.join(_dim(atoms) for atoms in plan.program.dims[value])}]"


def _dim(atoms: Dims | tuple[int, ...]) -> str:
    return "1" if not atoms else str(atoms[0]) if len(atoms) == 1 else f"({' '.join(map(str, atoms))})"


def _arg(arg: Arg) -> str:
    if isinstance(arg, Ref):
        return f"v{arg.id}"
    if isinstance(arg, Dtype):
        return arg.name
    if isinstance(arg, tuple):
        return f"({', '.join(_arg(a) for a in arg)})"
    return repr(arg)
