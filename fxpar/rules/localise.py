"""From a site and a joint choice to the call that one rank runs."""

from __future__ import annotations

from fxpar.plans.layout import Digit, Dims, Layout, digits
from fxpar.plans.mesh import Mesh
from fxpar.plans.program import Arg
from fxpar.rules.choices import JointChoice, Site
from fxpar.rules.expansion import Emission, Expansion
from fxpar.rules.factor_rule import Block
from fxpar.rules.registry import rule_cache, rule_for


def block_of(site: Site, choice: JointChoice, mesh: Mesh, coords: tuple[int, ...]) -> Block:
    """Digits of every operand and output on the rank at ``coords``."""

    def piece(dims: Dims, layout: Layout) -> tuple[tuple[Digit, ...], ...]:
        return digits(dims, layout, mesh, coords)

    return Block(
        tuple(piece(d, lay) for d, lay in zip(site.inputs, choice.inputs, strict=True)),
        tuple(None if d is None else piece(d, lay) for d, lay in zip(site.outputs, choice.outputs, strict=True)),
    )


def local_call(
    site: Site, choice: JointChoice, mesh: Mesh, coords: tuple[int, ...]
) -> tuple[str, tuple[Arg, ...]]:
    """(op, args) of the rank at ``coords``; args name operands by number, as in the site's call."""
    declared = rule_for(site.call.op)
    if declared is None or declared.localise is None:
        return site.call.op, site.call.args
    return declared.localise(site.call, block_of(site, choice, mesh, coords))


@rule_cache(50_000)
def expansion_of(site: Site, choice: JointChoice, mesh: Mesh, coords: tuple[int, ...]) -> Expansion:
    """The steps of the rank at ``coords`` under a choice that expands.

    Raises:
        ValueError: the op's rule has no expansion.
    """
    declared = rule_for(site.call.op)
    if declared is None or declared.expand is None:
        raise ValueError(f"{site.call.op} has no expansion")
    emission = Emission(site.call, block_of(site, choice, mesh, coords), choice.expands, mesh.sizes, coords)
    return emission.finished(declared.expand(emission))
