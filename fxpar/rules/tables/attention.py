"""Attention kept as one op: ``q [b,h,q,e], k [b,g,k,e], v [b,g,k,v], mask [b|1,h|1,q,k] -> [b,h,q,v], lse [b,h,q]``.

Batch and heads are loops. With grouped heads ``h = (g rep)``: ``g`` is a loop of all, ``rep`` one of the queries alone
(splitting it makes the gradients of k and v pending sums). The rows of ``q`` are a loop over whole keys and values
(splitting it makes the gradients of k and v pending sums, too); a causal mask is told which rows it has. The keys are
a loop: every rank attends to its own, and the log-sum-exps of all (two small all-reduces) make the results summands of
the whole; backward is local with the joined statistics, the gradient of q a pending sum. ``v`` is a loop of the values
and the output. ``e`` stays whole: it is contracted before the softmax.
"""

from __future__ import annotations

from fxpar.plans.program import Arg, Ref
from fxpar.rules.expansion import Emission
from fxpar.rules.factor_rule import Block, Call, Factors, Group, Slot
from fxpar.rules.groups import Region, loop, passes
from fxpar.rules.ops import attention as attention_ops  # noqa: F401  registers the ops
from fxpar.rules.registry import rule
from fxpar.rules.tables.random import geometry

KEYS = "keys"


def head_parts(call: Call, q: int, k: int) -> tuple[int, int]:
    """(shared key heads, query heads per key head)."""
    heads, shared = call.shape(q)[1], call.shape(k)[1]
    return shared, heads // shared


def attention(call: Call) -> Factors:
    q, k, v = (_operand(call, name) for name in ("q", "k", "v"))
    mask = call.operand("mask")
    shared, rep = head_parts(call, q, k)
    groups: tuple[Group, ...] = ()
    groups += loop(call, call.shape(q)[0], {q: 0, k: 0, v: 0, **_mask(call, mask, 0, 0)}, {0: 0, 1: 0})
    outer, inner = Slot((1,), 1, rep), Slot((1,), shared, 1)
    groups += loop(
        call, shared, {q: outer, k: 1, v: 1, **_mask(call, mask, 1, outer)}, {0: outer, 1: outer}, nonempty=True
    )
    groups += loop(call, rep, {q: inner, **_mask(call, mask, 1, inner)}, {0: inner, 1: inner}, nonempty=True)
    groups += loop(call, call.shape(q)[2], {q: 2, **_mask(call, mask, 2, 2)}, {0: 2, 1: 2})
    # the lse does not read v: it is the same on every rank
    groups += loop(call, call.shape(v)[3], {v: 3}, {0: 3})
    keys = {k: 2, v: 2, **_mask(call, mask, 3, 3)}
    groups += loop(call, call.shape(k)[2], keys, {}, contract={0: "sum"}, expands=KEYS)
    return Factors(groups, passes(call, "2>0"))


def _operand(call: Call, name: str) -> int:
    operand = call.operand(name)
    if operand is None:
        raise ValueError(f"{call.op} without {name}")
    return operand


def _mask(call: Call, mask: int | None, dim: int, region: Region) -> dict[int, Region]:
    """The region of the mask; a mask of fewer dims or of size 1 there is shared."""
    if mask is None:
        return {}
    shape = call.shape(mask)
    place = dim - 4 + len(shape)
    if place < 0 or shape[place] == 1:
        return {}
    return {mask: Slot((place,), region.lead, region.trail) if isinstance(region, Slot) else place}


def attention_backward(call: Call) -> Factors:
    """``grad, q, k, v, mask, out, lse -> dq, dk, dv, dmask``; linear in the gradient."""
    grad, q, k, v, out, lse = (_operand(call, name) for name in ("grad", "q", "k", "v", "out", "lse"))
    mask = call.operand("mask")
    shared, rep = head_parts(call, q, k)
    # without a wanted gradient of the mask the fourth output is an empty placeholder
    has_dmask = bool(call.arg("mask_needs_grad")) and len(call.outputs) > 3 and call.outputs[3] is not None
    groups: tuple[Group, ...] = ()

    def mask_parts(dim: int, region: Region) -> tuple[dict[int, Region], dict[int, Region], dict[int, str]]:
        carried = _mask(call, mask, dim, region)
        if not has_dmask:
            return carried, {}, {}
        if not carried:
            return {}, {}, {3: "sum"}
        return carried, {3: next(iter(carried.values()))}, {}

    m_in, m_out, m_sum = mask_parts(0, 0)
    groups += loop(
        call, call.shape(q)[0], {**dict.fromkeys((grad, q, k, v, out, lse), 0), **m_in}, {0: 0, 1: 0, 2: 0, **m_out},
        contract=m_sum,
    )  # fmt: skip
    outer, inner = Slot((1,), 1, rep), Slot((1,), shared, 1)
    m_in, m_out, m_sum = mask_parts(1, outer)
    groups += loop(
        call, shared, {**dict.fromkeys((grad, q, out, lse), outer), k: 1, v: 1, **m_in},
        {0: outer, 1: 1, 2: 1, **m_out}, contract=m_sum, nonempty=True,
    )  # fmt: skip
    m_in, m_out, m_sum = mask_parts(1, inner)
    groups += loop(
        call, rep, {**dict.fromkeys((grad, q, out, lse), inner), **m_in}, {0: inner, **m_out},
        contract={1: "sum", 2: "sum", **m_sum}, nonempty=True,
    )  # fmt: skip
    m_in, m_out, m_sum = mask_parts(2, 2)
    groups += loop(
        call, call.shape(q)[2], {**dict.fromkeys((grad, q, out, lse), 2), **m_in}, {0: 2, **m_out},
        contract={1: "sum", 2: "sum", **m_sum},
    )  # fmt: skip
    m_in, m_out, m_sum = mask_parts(3, 3)
    groups += loop(
        call, call.shape(k)[2], {k: 2, v: 2, **m_in}, {1: 2, 2: 2, **m_out}, contract={0: "sum", **m_sum}
    )
    return Factors(groups, passes(call, "0"))


def local_attention(call: Call, block: Block) -> tuple[str, tuple[Arg, ...]]:
    """Dropout draws by the place in the global [b, h, q, k] scores; a causal mask counts global rows and columns."""
    q, k = _operand(call, "q"), _operand(call, "k")
    changes: dict[str, Arg] = {}
    if call.arg("dropout_p"):
        changes["geometry"] = geometry((*block.inputs[q][:3], block.inputs[k][2]), call.arg("geometry"))
    if call.arg("is_causal") and any(d.length != d.size for d in block.inputs[q][2]):
        changes["rows"] = geometry((block.inputs[q][2],))
    args = call.with_args(**changes)
    if call.arg("is_causal") and any(d.length != d.size for d in block.inputs[k][2]):
        return call.op.replace("attention", "attention_block", 1), (*args, geometry((block.inputs[k][2],)))
    return call.op, args


def split_keys(e: Emission) -> tuple[Ref | None, ...]:
    """Attention to this rank's keys, weighed by its share of the whole sum of exponentials."""
    op, args = local_attention(e.call, e.block)
    out, lse = e.op(op, *args)
    top = e.all_reduce(lse, "max", KEYS)
    (share,) = e.op("fxpar.key_share.default", lse, top)
    total = e.all_reduce(share, "sum", KEYS)
    return e.op("fxpar.joined_share.default", out, lse, top, total)


rule("fxpar::attention", attention, localise=local_attention, random=True, expand=split_keys)
rule("fxpar::attention_backward", attention_backward, localise=local_attention, random=True)
