"""What a plan decides and predicts, for people and as plain data."""

from __future__ import annotations

from collections import Counter
from typing import Any

from fxpar.advice import advice
from fxpar.layers import layer_key
from fxpar.memory_units import MEMORY_UNIT
from fxpar.parameter_copies import copy_rows, parameter_copies, zero_words
from fxpar.plans.errors import FxparError
from fxpar.plans.layout import layout_text
from fxpar.plans.mesh import Mesh
from fxpar.plans.plan import ASKED_FOR, NO_RULE, Candidate, Certificate, Plan, Prediction
from fxpar.plans.program import Node
from fxpar.plans.text import canonical_text
from fxpar.splits import (
    BATCH_DIM,
    EXPLAINED,
    HEAVY,
    Named,
    SplitDim,
    keeps_whole,
    named_dims,
    split_dims,
    weights_along,
)

GIB = 2**30


def plan_facts(plan: Plan) -> dict[str, Any]:
    """Everything ``fxpar show`` prints, as plain data; times in ns, sizes in bytes; figures are simulated."""
    return {
        "model": dict(plan.provenance).get("model", ""),
        "mesh": {a.name: a.size for a in plan.decisions.mesh.axes},
        "cluster": plan.cluster,
        "memory_bytes": plan.memory_bytes,
        "reserve_bytes": plan.reserve_bytes,
        "prediction": _facts(plan.prediction),
        "candidates": [
            {"name": c.name, "mesh": str(c.mesh), "fits": c.fits, "note": c.note,
             "prediction": None if c.prediction is None else _facts(c.prediction)}
            for c in plan.candidates
        ],
        "considered": [
            {"pp": c.pp, "dp": c.dp, "tp": c.tp, "microbatches": c.microbatches, "estimated_ns": c.estimated_ns,
             "estimated_bytes": c.estimated_bytes, "step_ns": c.step_ns, "lost": c.lost}
            for c in plan.considered
        ],
        "certificate": certificate_facts(plan.certificate),
        "parameters": [{"names": k, "layout": lay, "count": n} for (k, lay), n in parameter_layouts(plan).items()],
        "copies": [{"names": name, "life": life, "count": n, "bytes": total}
                   for name, life, n, total in copy_rows(parameter_copies(plan))],
        "zero": zero_words(parameter_copies(plan)),
        "work": dict(split_work(plan)),
        "splits": [
            {"axis": s.axis, "dim": s.name, "share": round(s.share, 4), "size": s.size, "pieces": s.pieces}
            for s in splits_of(plan)
        ],
        "why": why(plan),
        "nodes": len(plan.program.nodes),
        "notes": notes(plan),
        "advice": advice(plan, splits_of(plan)),
        "fingerprint": {"program": plan.fingerprint.program, "rules": plan.fingerprint.rules,
                        "torch": plan.fingerprint.torch, "fxpar": plan.fingerprint.fxpar},
        "provenance": {key: text for key, text in plan.provenance if not key.startswith(NO_RULE)},
    }


def _facts(p: Prediction) -> dict[str, Any]:
    return {
        "step_ns": p.step_ns, "compute_ns": p.compute_ns, "communication_ns": p.communication_ns,
        "exposed_ns": p.exposed_ns, "peak_bytes": p.peak_bytes, "parameter_bytes": p.parameter_bytes,
        "gradient_bytes": p.gradient_bytes, "optimizer_bytes": p.optimizer_bytes,
        "activation_bytes": p.activation_bytes, "label": "simulated",
        "collectives": [{"kind": c.kind, "axis": c.axis, "count": c.count, "bytes": c.bytes, "ns": c.ns}
                        for c in p.collectives],
    }


def parameter_layouts(plan: Plan) -> Counter[tuple[str, str]]:
    """(name with layer numbers starred, layout) -> how many parameters."""
    return Counter(
        (layer_key(i.name), layout_text(lay))
        for i, lay in zip(plan.program.inputs, plan.decisions.inputs, strict=True) if i.kind == "parameter"
    )


def split_work(plan: Plan) -> Counter[str]:
    """How the matmuls, convolutions and attentions of the forward are split: per axis what each choice does."""
    counts: Counter[str] = Counter()
    for node, names in zip(plan.program.nodes, plan.decisions.choices, strict=True):
        if node.op not in HEAVY or node.phase != "forward":
            continue
        counts[f"{node.op.split('.')[1]}: {_work_of(node, names, plan)}"] += 1
    return counts


def _work_of(node: Node, names: tuple[str, ...], plan: Plan) -> str:
    from fxpar.rules.choices import choice_by_names, site_of

    try:
        choice = choice_by_names(site_of(node, plan.program), names, plan.decisions.mesh)
    except _DAMAGED:
        choice = None  # a damaged file: the rule of the op cannot be applied to the call
    if choice is None:
        return f"({' '.join(names)}) does not fit the op's rule: this plan cannot be loaded"
    return f"{', '.join(map(layout_text, choice.inputs))} -> {layout_text(choice.outputs[0])}"


_DAMAGED = (ArithmeticError, AttributeError, FxparError, LookupError, RuntimeError, TypeError, ValueError)
"""What the rule of an op raises on a call that only a damaged file can hold."""


def named_of(plan: Plan) -> Named | None:
    """The names of the plan's logical dims; None for a damaged file."""
    stated = dict(plan.provenance).get(BATCH_DIM, "")
    try:
        return named_dims(plan.program, int(stated) if stated.lstrip("-").isdigit() else None)
    except _DAMAGED:
        return None


def splits_of(plan: Plan, named: Named | None = None) -> tuple[SplitDim, ...]:
    """The logical dims that each axis splits in the forward; none for a damaged file."""
    named = named or named_of(plan)
    try:
        return split_dims(plan.program, plan.decisions, named) if named is not None else ()
    except _DAMAGED:
        return ()


def split_lines(splits: tuple[SplitDim, ...], mesh: Mesh) -> list[str]:
    """Per axis the dims it splits, with the share of the forward's heavy flops where it does."""
    lines = []
    for axis in mesh.axes:
        found = [f"{s.name} {s.share:.0%}" for s in splits if s.axis == axis.name and s.share >= 0.005]
        lines.append(f"  {axis.name}={axis.size}  {', '.join(found) or 'nothing'}")
    return lines


def why(plan: Plan) -> list[str]:
    """Why experts or the sequence are split: how many each rank has, and what the plan without it costs."""
    named = named_of(plan)
    lines = []
    splits = splits_of(plan, named)
    for name in EXPLAINED:
        found = [s for s in splits if s.name == name]
        if named is None or not found:
            continue
        most = max(found, key=lambda s: s.pieces)
        over = ", ".join(s.axis for s in found)
        text = f"{name} split over {over}: {-(-most.size // most.pieces)} of {most.size} per rank"
        if name == "experts":
            whole, stored = weights_along(plan.program, plan.decisions, named, name)
            text += f" (balanced routing assumed); of {gib(whole)} of their weights a device stores {gib(stored)}"
        beside = next((c for c in plan.candidates if c.name == keeps_whole(name)), None)
        lines.append(f"{text}; {_comparison(beside, plan)}" if beside is not None else text)
    return lines


def _comparison(beside: Candidate, plan: Plan) -> str:
    """What the best plan found with the dim whole costs more."""
    p, chosen = beside.prediction, plan.prediction
    found = f"the best plan found with {beside.name}"
    if p is None:
        return f"{found} could not be simulated"
    if not beside.fits:
        return f"{found} needs {gib(p.peak_bytes)} of {gib(plan.memory_bytes)}"
    more = (p.step_ns - chosen.step_ns) / max(chosen.step_ns, 1)
    parts = [f"{what} {ms(now)} instead of {ms(then)}" for what, now, then in (
        ("compute", p.compute_ns, chosen.compute_ns), ("exposed communication", p.exposed_ns, chosen.exposed_ns))]
    return f"{found} takes {ms(p.step_ns)} ({more:+.1%}): {', '.join(parts)}"


def plan_text(plan: Plan, *, full: bool = False) -> str:
    """The report of ``fxpar show``; ``full``: the plan's canonical text as well."""
    p, mesh = plan.prediction, plan.decisions.mesh
    made = dict(plan.provenance)
    lines = [
        f"{made.get('model', 'model')} on {plan.cluster}{' CPU ranks' if plan.cluster.isdigit() else ''}, "
        f"mesh {mesh} ({mesh.world_size} ranks), "
        f"{made.get('precision', '')}".rstrip(", "),
        *(f"asked for: {text}" for key, text in plan.provenance if key.startswith(ASKED_FOR)),
        "",
        *(f"{what}: {made[what]}" for what in ("microbatches", "stages") if what in made),
        f"step {ms(p.step_ns)} ({made.get('figures', 'simulated')}): compute {ms(p.compute_ns)}, "
        + (f"exposed communication {ms(p.exposed_ns)} of {ms(p.communication_ns)}"
           if plan.decisions.pipeline is None else f"waiting and exposed communication {ms(p.exposed_ns)}"),
        f"memory {gib(p.peak_bytes)} of {gib(plan.memory_bytes)} per device: parameters {gib(p.parameter_bytes)}, "
        f"gradients {gib(p.gradient_bytes)}, optimizer {gib(p.optimizer_bytes)}, "
        f"activations {gib(p.activation_bytes)}"
        + (f"; {gib(plan.reserve_bytes)} more are reserved" if plan.reserve_bytes else ""),
    ]
    if p.collectives:
        lines += ["", "collectives of one step and rank"]
        lines += table([("", "axis", "count", "tensors", "time"), *(
            (c.kind, c.axis, str(c.count), size(c.bytes), ms(c.ns)) for c in p.collectives)])
    lines += ["", "parameters"]
    lines += table([(f"{n} x" if n > 1 else "", key, lay) for (key, lay), n in _by_layout(plan)])
    lines += copy_lines(plan)
    splits = splits_of(plan)
    if splits:
        lines += ["", "each axis splits (share of the flops of the forward's products, convolutions and attention)"]
        lines += split_lines(splits, mesh)
        lines += [f"  {text}" for text in why(plan)]
    work = split_work(plan)
    if work:
        lines += ["", "matmuls, convolutions and attention of the forward (operands -> result, one entry per axis)"]
        lines += table([(f"{n} x", text) for text, n in work.most_common(8)])
        if len(work) > 8:
            lines.append(f"  and {len(work) - 8} more kinds (--full shows every op)")
    if plan.candidates:
        lines += ["", "plans compared, same cost model (simulated)"]
        head = ("", "mesh", "step", "compute", "exposed", "memory", "")
        lines += table([head, *map(_candidate_row, plan.candidates)])
        lines += ["", *reasons(plan)]
    lines += [line for text in notes(plan) for line in ("", f"note: {text}")]
    lines += [line for text in advice(plan, splits) for line in ("", f"advice: {text}")]
    lines += ["", *(certificate_lines(plan.certificate) if plan.decisions.pipeline is None else
                    ["certificate: nothing is proven of the placements of plans with stages"]), *everywhere_lines(plan)]
    if full:
        lines += ["", canonical_text(plan).rstrip()]
    return "\n".join(lines)


def copy_lines(plan: Plan) -> list[str]:
    """How long copies of parameters live, one line per life; none where nothing is gathered in both halves."""
    copies = parameter_copies(plan)
    words = zero_words(copies)
    if not words:
        return []
    joined: dict[str, list[tuple[str, int, int]]] = {}
    for name, life, count, total in copy_rows(copies):
        joined.setdefault(life, []).append((name, count, total))
    rows: list[tuple[str, ...]] = [("", "", "per device", "")]
    for life, names in joined.items():
        shown = ", ".join(name.split(".", 1)[-1] if len(names) > 1 else name for name, _, _ in names[:4])
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        count, total = sum(n for _, n, _ in names), sum(b for _, _, b in names)
        rows.append((f"{count} x", shown + more, gib(total), life))
    return ["", f"copies of parameters, {words}", *table(rows)]


def certificate_facts(c: Certificate) -> dict[str, Any]:
    """The certificate as plain data; ns. ``memory_price``: what one more GiB per device saves at most, beyond the gap;
    None where the plan holds no proof."""
    price = memory_price(c)
    return {
        "status": c.status, "cost_ns": c.cost_ns, "bound_ns": c.bound_ns, "gap": c.gap,
        "can_be_checked": c.proof is not None, "memory_binds": None if price is None else price > 0,
        "memory_price_ns_per_gib": price, "any_overlap_bound_ns": None if c.overlap is None else c.overlap.bound_ns,
        "everywhere_bound_ns": c.everywhere_ns or None,
    }


def memory_price(c: Certificate) -> int | None:
    """ns that one more GiB of memory per device saves at most, beyond the gap: the proof's bound falls by no more."""
    if c.proof is None:
        return None
    numerator, denominator = c.proof.multiplier
    unit = MEMORY_UNIT if c.question is None else c.question.memory_unit
    return -(-numerator * (GIB // unit) // denominator)


def certificate_lines(c: Certificate) -> list[str]:
    """The certificate for people."""
    lines = [f"certificate: {c.status}; cost of the priced problem {ms(c.cost_ns)}, "
             f"proven bound {ms(c.bound_ns)}, gap {c.gap:.2%}"]
    price = memory_price(c)
    if price is None:
        return lines
    lines[0] += " (fxpar check --certificate counts it again)"
    if c.status == "optimal" and c.gap:
        lines.append("  the solver's exact search found nothing cheaper; what can be checked without it is the bound")
    if price:
        saved = ms(price + c.cost_ns - c.bound_ns)
        lines.append(f"  memory binds: +1 GiB per device would save at most {saved} ({ms(price)} and the gap)")
    else:
        lines.append("  memory does not bind: more of it would save nothing beyond the gap")
    if c.overlap is not None:
        lines.append(f"  no schedule of any plan in this space can take less than {ms(c.overlap.bound_ns)}, "
                     f"however well it overlaps (one stream of compute, one of communication)")
    return lines


def everywhere_lines(plan: Plan) -> list[str]:
    """The bound on all plans of the cluster; none where nothing is said."""
    least = plan.certificate.everywhere_ns
    if not least:
        return []
    count = plan.decisions.mesh.world_size
    return [f"  no plan on {'this device' if count == 1 else f'these {count} devices'} takes less than {ms(least)}, "
            f"whatever its mesh, stages, microbatches, schedule and overlap: the work alone takes that, shared evenly"]


def notes(plan: Plan) -> list[str]:
    """What the user should know of: every op that has no rule, with what it costs."""
    return [text for key, text in plan.provenance if key.startswith(NO_RULE)]


def _by_layout(plan: Plan) -> list[tuple[tuple[str, str], int]]:
    """Parameters of a layout joined into one line where there are many names."""
    joined: dict[str, list[tuple[str, int]]] = {}
    for (key, lay), n in parameter_layouts(plan).items():
        joined.setdefault(lay, []).append((key, n))
    rows: list[tuple[tuple[str, str], int]] = []
    for lay, names in joined.items():
        shown = ", ".join(name.split(".", 1)[-1] if len(names) > 1 else name for name, _ in names[:4])
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        rows.append(((shown + more, lay), sum(n for _, n in names)))
    return rows


def _candidate_row(c: Candidate) -> tuple[str, ...]:
    p = c.prediction
    if p is None:
        return (c.name, str(c.mesh), "-", "-", "-", "-", c.note)
    return (c.name, str(c.mesh), ms(p.step_ns), ms(p.compute_ns), ms(p.exposed_ns), gib(p.peak_bytes),
            c.note if c.fits else "does not fit")


def reasons(plan: Plan) -> list[str]:
    """Why this plan: where its time goes beside each other candidate (of those with a dim whole :func:`why` tells)."""
    chosen = plan.prediction
    lines = []
    for c in plan.candidates[1:]:
        if c.prediction is None or c.name in map(keeps_whole, EXPLAINED):
            continue
        if not c.fits:
            over = c.prediction.peak_bytes - plan.memory_bytes
            lines.append(f"{c.name} on {c.mesh} does not fit by {gib(over)}")
            continue
        compute = c.prediction.compute_ns - chosen.compute_ns
        exposed = c.prediction.exposed_ns - chosen.exposed_ns
        if compute + exposed <= 0:
            lines.append(f"{c.name} on {c.mesh} is as fast")
            continue
        parts = [f"{ms(abs(d))} {'more' if d > 0 else 'less'} {what}"
                 for d, what in ((compute, "compute"), (exposed, "exposed communication")) if d]
        longer = (compute + exposed) / max(chosen.step_ns, 1)
        lines.append(f"{c.name} on {c.mesh} takes {longer:.1%} longer: {', '.join(parts)}")
    return lines


def table(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows as aligned, indented lines."""
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))] if rows else []
    return ["  " + "  ".join(cell.ljust(w) for cell, w in zip(r, widths, strict=True)).rstrip() for r in rows]


def ms(ns: int) -> str:
    """A time for people."""
    if abs(ns) >= 10**9:
        return f"{ns / 1e9:.2f} s"
    return f"{ns / 1e6:.2f} ms" if abs(ns) >= 10**6 else f"{ns / 1e3:.1f} us"


def gib(count: int) -> str:
    """Bytes for people, in GiB or less."""
    return f"{count / GIB:.2f} GiB" if count >= GIB // 10 else size(count)


def size(count: int) -> str:
    """Bytes for people."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"
