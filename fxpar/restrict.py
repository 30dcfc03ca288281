"""What the names of mesh axes ask for, as filters over choices.

An anonymous axis leaves the solver free. ``dp`` splits the batch wherever an op can, and nothing else; parameters stay
whole on it, or are cut on it between uses (ZeRO-3), casts and views of them with them. ``tp`` never splits the batch,
must split every matmul weight that can be split, and stores it cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from fxpar.plans.errors import FxparError, UnsupportedError
from fxpar.plans.layout import Layout, Replicate, Shard
from fxpar.plans.lifetimes import parameter_roots
from fxpar.plans.mesh import Mesh
from fxpar.plans.program import Program, node_inputs
from fxpar.rules.choices import JointChoice, Site

AXIS_NAMES = ("dp", "tp")
"""Names with a meaning; an axis in the role ``""`` is free."""
_WEIGHT_OPERAND = {"aten.mm.default": (0, 1), "aten.bmm.default": (0, 1), "aten.addmm.default": (2, 1),
                   "aten.baddbmm.default": (2, 1), "aten.convolution.default": (1,),
                   "fxpar.experts.default": (3, 4)}


@dataclass(frozen=True, eq=False)
class Restriction:
    """Filters for :func:`fxpar.formulate.formulate`.

    ``roles``: per mesh axis ``"dp"``, ``"tp"`` or ``""`` (free).
    ``is_batch(node, factor)`` and ``input_is_batch(input, dim, atom)`` say which loops and atoms are the batch;
    ``weights``: operands of forward products that are parameters, ``weight_values`` those parameters.
    ``sharded``: parameters are all cut on the dp axis (ZeRO-3), all whole on it, or (None) each as is best.
    """

    program: Program
    roles: tuple[str, ...]
    is_batch: Callable[[int, int], bool]
    input_is_batch: Callable[[int, int, int], bool]
    weights: dict[int, tuple[int, ...]]
    weight_values: frozenset[int]
    sharded: bool | None = False

    def nodes(self, index: int, site: Site, choices: Sequence[JointChoice]) -> Sequence[JointChoice]:
        """Choices of a node under the named axes: each axis' wish in turn, as far as anything is left."""
        for axis, name in enumerate(self.roles):
            if name == "dp":
                choices = self._batch_only(index, choices, axis)
            elif name == "tp":
                choices = self._weights_only(index, choices, axis)
        return choices

    def _batch_only(
        self, index: int, choices: Sequence[JointChoice], axis: int
    ) -> Sequence[JointChoice]:
        batch = [c for c in choices if self._splits_batch(index, c.names[axis])]
        if not batch and self.sharded is not False and index in self._carriers:
            return choices
        return batch or [c for c in choices if not c.names[axis].startswith("f")]

    @cached_property
    def _carriers(self) -> frozenset[int]:
        """Nodes that pass a parameter on: where it is stored in pieces they may work on pieces, so that a cast to
        bfloat16 halves what is gathered."""
        roots = parameter_roots(self.program)
        return frozenset(n for n, node in enumerate(self.program.nodes) if not roots.keys().isdisjoint(node.outputs))

    def _weights_only(
        self, index: int, choices: Sequence[JointChoice], axis: int
    ) -> Sequence[JointChoice]:
        # rows of a norm, keys and image rows in several steps are other parallelisms than that of weights
        rest = [
            c for c in choices
            if not self._splits_batch(index, c.names[axis]) and not (c.expands and c.expands[axis])
        ]
        cut = [
            c for c in rest
            if any(isinstance(c.inputs[o][axis], Shard) for o in self.weights.get(index, ()))
        ]
        return cut or rest

    def _splits_batch(self, index: int, name: str) -> bool:
        if not name.startswith("f"):
            return False
        first, _, length = name[1:].partition("+")
        return any(self.is_batch(index, f) for f in range(int(first), int(first) + int(length or 1)))

    def inputs(self, index: int, layouts: Sequence[Layout]) -> Sequence[Layout]:
        """Stored layouts of an input under the named axes."""
        item = self.program.inputs[index]
        for axis, name in enumerate(self.roles):
            cut = [lay for lay in layouts if isinstance(lay[axis], Shard)]
            whole = [lay for lay in layouts if isinstance(lay[axis], Replicate)]
            if item.kind == "parameter":
                if name == "dp":
                    if self.sharded is not None:
                        layouts = (cut or whole) if self.sharded else whole
                elif name == "tp":
                    layouts = cut if cut and item.value in self.weight_values else layouts
            elif item.kind == "input":
                batch = [lay for lay in cut if self._input_batch(index, lay[axis])]
                if name == "dp":
                    layouts = batch or whole
                elif name == "tp":
                    layouts = [lay for lay in layouts if not self._input_batch(index, lay[axis])]
        return layouts

    def _input_batch(self, index: int, placement: object) -> bool:
        return isinstance(placement, Shard) and any(
            self.input_is_batch(index, placement.dim, a)
            for a in range(placement.first, placement.first + placement.length)
        )


def weight_operands(program: Program) -> dict[int, tuple[int, ...]]:
    """Per forward matmul or convolution, the operands that are a parameter, seen through views and casts."""
    roots = parameter_roots(program)
    result = {}
    for index, node in enumerate(program.nodes):
        if node.phase == "forward" and node.op in _WEIGHT_OPERAND:
            values = node_inputs(node)
            found = tuple(o for o in _WEIGHT_OPERAND[node.op] if o < len(values) and values[o] in roots)
            if found:
                result[index] = found
    return result


def weight_values(program: Program, weights: dict[int, tuple[int, ...]]) -> frozenset[int]:
    """The parameters (of at least two dims) that :func:`weight_operands` found in use."""
    roots = parameter_roots(program)
    used = {roots[node_inputs(program.nodes[n])[o]] for n, operands in weights.items() for o in operands}
    return frozenset(v for v in used if len(program.types[v].shape) > 1)


def check_axis_names(mesh: Mesh) -> None:
    """Refuse axis names that mean something this version does not do.

    Raises:
        UnsupportedError: ``ep``, ``cp`` of more than one rank.
        FxparError: an unknown name.
    """
    for axis in mesh.axes:
        if axis.name in ("ep", "cp") and axis.size > 1:
            raise UnsupportedError(
                f"mesh axis {axis.name}={axis.size} is not available in this version", where="--mesh",
                way_out="leave the axis anonymous (2x2): the solver is then free to split experts or sequence",
            )
        if axis.name not in (*AXIS_NAMES, "pp", "ep", "cp") and not (axis.name[:1] == "a" and axis.name[1:].isdigit()):
            raise FxparError(f"mesh axis '{axis.name}' is not known", where="--mesh",
                             way_out=f"name axes {', '.join(AXIS_NAMES)}, pp, or give sizes only (2x2)")


def roles_of(mesh: Mesh) -> tuple[str, ...]:
    """The role that each axis' name gives it."""
    return tuple(a.name if a.name in AXIS_NAMES else "" for a in mesh.axes)
