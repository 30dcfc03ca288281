"""What somebody who tunes plans by hand would remark on one, beyond what the cost model says of it."""

from __future__ import annotations

from fxpar.plans.plan import Plan
from fxpar.restrict import roles_of
from fxpar.splits import SplitDim

NEAR = 0.01
"""A plan by hand this much slower is worth a word: it is simpler."""
TILE = 8
"""Elements of 16-bit numbers that tensor cores load at once: products of other sizes run on slower kernels."""
COUNTED = ("batch", "sequence", "heads", "experts")
"""Dims whose pieces are whole rows or blocks: they need no multiple of :data:`TILE`."""


def advice(plan: Plan, splits: tuple[SplitDim, ...]) -> list[str]:
    """Remarks on a plan that was chosen (none on a random one); ``splits``: the dims that its axes split."""
    if plan.certificate.status == "random":
        return []
    return [*_data_parallel(plan), *_fragments(plan, splits)]


def _data_parallel(plan: Plan) -> list[str]:
    """Plain data parallel that fits and is about as fast, where the user did not name the axes."""
    if any(roles_of(plan.decisions.mesh)) or plan.decisions.mesh.world_size == 1:
        return []
    step = plan.prediction.step_ns
    steps = [c.prediction.step_ns for c in plan.candidates
             if c.name == "data parallel" and c.fits and c.prediction is not None]
    slower = (min(steps) - step) / max(step, 1) if steps else NEAR + 1
    if slower > NEAR:
        return []
    world = plan.decisions.mesh.world_size
    return [f"plain data parallel is within {max(slower, 0.0):.1%} and simpler: consider --mesh dp={world}"]


def _fragments(plan: Plan, splits: tuple[SplitDim, ...]) -> list[str]:
    """Axes that cut dims into uneven pieces, or into pieces that fill no tile."""
    lines = []
    for axis in plan.decisions.mesh.axes:
        mine = [s for s in splits if s.axis == axis.name]
        cut = [s for s in mine if _ragged(s)]
        if not cut:
            continue
        what = ", ".join(f"{s.name} {s.size} into pieces of up to {-(-s.size // s.pieces)}" for s in cut)
        share = sum(s.share for s in cut)
        every = "every product" if len(cut) == len(mine) else f"products with {min(share, 1.0):.0%} of the flops"
        lines.append(f"mesh axis {axis.name}={axis.size} fragments {every}: {what}; kernels are slower at such sizes "
                     f"than the cost model says (pad the size, or use an axis that divides it)")
    return lines


def _ragged(s: SplitDim) -> bool:
    if s.size % s.pieces:
        return True
    return s.name not in COUNTED and s.size % TILE == 0 and (s.size // s.pieces) % TILE != 0
