"""A plan as bytes and back: MessagePack, typed, checked, deterministic.

The file is one MessagePack array ``[magic, version, sha256 of payload, payload]``; the payload is the wire form of a
:class:`~fxpar.plans.plan.Plan`, whose types, dims and strings are interned. Nothing in a file is executed or becomes
source text: op names are looked up in the rule registry by the loader, all other strings are labels.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgpack
import msgspec

from fxpar.plans.check import check_plan
from fxpar.plans.errors import PlanFileError
from fxpar.plans.layout import Dims, Layout
from fxpar.plans.mesh import Mesh
from fxpar.plans.plan import (
    FORMAT_VERSION,
    Candidate,
    Certificate,
    Considered,
    Decisions,
    Fingerprint,
    Pipeline,
    Plan,
    Prediction,
)
from fxpar.plans.program import Arg, Constant, Input, Microbatches, Node, Output, Program, TensorType

MAGIC = "fxpar-plan"
READABLE = (2, FORMAT_VERSION)
"""Format versions that load: what version 3 added (microbatches) is left at its defaults."""
MAX_FILE_BYTES = 256 * 2**20
MAX_DEPTH = 64
MAX_STRING = 4096
MAX_ITEMS = 2_000_000
_WAY_OUT = "compile the plan again with `fxpar compile`, and copy it whole"

T = TypeVar("T", bound=Hashable)


class WireNode(msgspec.Struct, frozen=True, array_like=True):
    """A node with strings and choice names replaced by indices into the tables of :class:`Wire`."""

    op: int
    args: tuple[Arg, ...]
    outputs: tuple[int, ...]
    backward: bool
    module: int
    source: int
    choice: int


class Wire(msgspec.Struct, frozen=True):
    """The interned form of a plan."""

    strings: tuple[str, ...]
    types: tuple[TensorType, ...]
    dims: tuple[Dims, ...]
    layouts: tuple[Layout, ...]
    choices: tuple[tuple[str, ...], ...]
    values: tuple[tuple[int, int], ...]
    nodes: tuple[WireNode, ...]
    inputs: tuple[tuple[Input, int], ...]
    outputs: tuple[tuple[Output, int], ...]
    constants: tuple[Constant, ...]
    baked: tuple[tuple[str, str], ...]
    call: tuple[str, ...]
    structure: Arg
    mesh: Mesh
    recompute: tuple[int, ...]
    reuse: tuple[int, ...]
    cluster: str
    memory_bytes: int
    prediction: Prediction
    candidates: tuple[Candidate, ...]
    certificate: Certificate
    fingerprint: Fingerprint
    provenance: tuple[tuple[str, str], ...]
    reserve_bytes: int = 0
    time: Microbatches | None = None
    reduce_each: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    pipeline: Pipeline | None = None
    considered: tuple[Considered, ...] = ()


def _intern(items: Iterable[T]) -> tuple[tuple[T, ...], dict[T, int]]:
    table = {item: index for index, item in enumerate(dict.fromkeys(items))}
    return tuple(table), table


def to_wire(plan: Plan) -> Wire:
    """The plan with repeated parts interned."""
    program, decisions = plan.program, plan.decisions
    strings, string_of = _intern(s for n in program.nodes for s in (n.op, n.module, n.source))
    types, type_of = _intern(program.types)
    dims, dims_of = _intern(program.dims)
    layouts, layout_of = _intern((*decisions.inputs, *decisions.outputs))
    choices, choice_of = _intern(decisions.choices)
    return Wire(
        strings, types, dims, layouts, choices,
        tuple((type_of[t], dims_of[d]) for t, d in zip(program.types, program.dims, strict=True)),
        tuple(
            WireNode(string_of[n.op], n.args, n.outputs, n.phase == "backward", string_of[n.module],
                     string_of[n.source], choice_of[c])
            for n, c in zip(program.nodes, decisions.choices, strict=True)
        ),
        tuple((i, layout_of[lay]) for i, lay in zip(program.inputs, decisions.inputs, strict=True)),
        tuple((o, layout_of[lay]) for o, lay in zip(program.outputs, decisions.outputs, strict=True)),
        program.constants, program.baked, program.call, program.structure, decisions.mesh, decisions.recompute,
        decisions.reuse, plan.cluster, plan.memory_bytes, plan.prediction, plan.candidates, plan.certificate,
        plan.fingerprint, plan.provenance, plan.reserve_bytes, program.time, decisions.reduce_each,
        decisions.held, decisions.pipeline, plan.considered,
    )


def from_wire(wire: Wire) -> Plan:
    """Inverse of :func:`to_wire`.

    Raises:
        PlanFileError: an index points outside its table.
    """

    def pick(table: tuple[Any, ...], index: int, what: str) -> Any:
        if not 0 <= index < len(table):
            raise PlanFileError("the plan file is damaged", numbers=f"{what} {index} of {len(table)}", way_out=_WAY_OUT)
        return table[index]

    program = Program(
        types=tuple(pick(wire.types, t, "type") for t, _ in wire.values),
        inputs=tuple(i for i, _ in wire.inputs),
        nodes=tuple(
            Node(pick(wire.strings, n.op, "string"), n.args, n.outputs, "backward" if n.backward else "forward",
                 pick(wire.strings, n.module, "string"), pick(wire.strings, n.source, "string"))
            for n in wire.nodes
        ),
        outputs=tuple(o for o, _ in wire.outputs),
        dims=tuple(pick(wire.dims, d, "dims") for _, d in wire.values),
        constants=wire.constants, baked=wire.baked, call=wire.call, structure=wire.structure, time=wire.time,
    )
    decisions = Decisions(
        wire.mesh,
        tuple(pick(wire.choices, n.choice, "choice") for n in wire.nodes),
        tuple(pick(wire.layouts, lay, "layout") for _, lay in wire.inputs),
        tuple(pick(wire.layouts, lay, "layout") for _, lay in wire.outputs),
        wire.recompute, wire.reuse, wire.reduce_each, wire.held, wire.pipeline,
    )
    return Plan(program, decisions, wire.cluster, wire.memory_bytes, wire.prediction, wire.candidates,
                wire.certificate, wire.fingerprint, wire.provenance, wire.reserve_bytes, wire.considered)


def encode(plan: Plan) -> bytes:
    """The plan file's bytes: the same for the same plan on every machine."""
    payload = msgpack.packb(msgspec.to_builtins(to_wire(plan), builtin_types=(bytes,)), use_bin_type=True)
    return msgpack.packb([MAGIC, FORMAT_VERSION, hashlib.sha256(payload).digest(), payload], use_bin_type=True)


def decode(data: bytes, *, where: str = "", sha256: str | None = None) -> Plan:
    """The plan in ``data``, checked whole before anything of it is used.

    Args:
        data: contents of a plan file.
        where: its name, for errors.
        sha256: when given, the hex digest the whole file must have.

    Raises:
        PlanFileError: not a plan file, another version, damaged, hostile, or inconsistent.
    """

    def refuse(numbers: str, what: str = "the plan file is damaged") -> PlanFileError:
        return PlanFileError(what, where=where, numbers=numbers, way_out=_WAY_OUT)

    if len(data) > MAX_FILE_BYTES:
        raise refuse(f"{len(data)} bytes of at most {MAX_FILE_BYTES}", "the plan file is too large")
    if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256.lower():
        raise refuse(f"sha256 {hashlib.sha256(data).hexdigest()}, expected {sha256.lower()}",
                     "the plan file is not the one that was asked for")
    try:
        outer = msgpack.unpackb(data, strict_map_key=True, max_array_len=4, max_map_len=0, max_ext_len=0,
                                max_str_len=64, max_bin_len=MAX_FILE_BYTES)
    except (ValueError, msgpack.UnpackException, UnicodeDecodeError) as error:
        raise refuse(f"{len(data)} bytes: {error}", "this is not a plan file, or only a part of one") from error
    if not (isinstance(outer, list) and len(outer) == 4 and outer[0] == MAGIC):
        raise refuse("no fxpar-plan header", "this is not a plan file")
    _, version, digest, payload = outer
    if type(version) is not int or version not in READABLE:  # True equals 1
        raise PlanFileError(f"plan format {version!r} is not known", where=where,
                            numbers=f"this fxpar reads formats {', '.join(map(str, READABLE))}",
                            way_out="compile the plan again with this fxpar")
    if not isinstance(payload, bytes) or hashlib.sha256(payload).digest() != digest:
        raise refuse("its checksum does not match its contents")
    try:
        raw = msgpack.unpackb(payload, strict_map_key=True, object_pairs_hook=_unique_map, ext_hook=_no_extension,
                              max_str_len=MAX_STRING, max_array_len=MAX_ITEMS, max_map_len=64,
                              max_bin_len=2**21, max_ext_len=0)
        _check_plain(raw)
        plan = from_wire(msgspec.convert(raw, Wire, strict=True))
    except PlanFileError as error:
        raise PlanFileError(error.what, where=where, numbers=error.numbers, way_out=error.way_out) from error
    except (ValueError, RecursionError, msgpack.UnpackException, msgspec.ValidationError) as error:
        raise refuse(str(error)) from error
    check_plan(plan, where=where)
    return plan


def _unique_map(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a map has a key twice")
    return result


def _no_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code}")


def _check_plain(root: Any) -> None:
    """Depth, NaN and integer range, without recursion."""
    stack = [(root, 1)]
    while stack:
        item, depth = stack.pop()
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
        if isinstance(item, list):
            stack += [(child, depth + 1) for child in item]
        elif isinstance(item, dict):
            stack += [(child, depth + 1) for child in item.values()]
        elif isinstance(item, float) and math.isnan(item):
            raise ValueError("a number is NaN")
        elif isinstance(item, int) and not -(2**63) <= item < 2**63:
            raise ValueError("an integer is beyond 64 bits")


def program_digest(program: Program) -> str:
    """sha256 of the program's content (dims included)."""
    content = msgspec.structs.asdict(program)
    if program.time is None:
        del content["time"]  # the digest that format 2 gave the program
    return hashlib.sha256(msgspec.msgpack.encode(content)).hexdigest()


def read_plan(path: str | Path, *, sha256: str | None = None) -> Plan:
    """Read and check a plan file.

    Raises:
        PlanFileError: missing, unreadable, or refused by :func:`decode`.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise PlanFileError(f"cannot read the plan {path}", numbers=error.strerror or str(error),
                            way_out="give the path of a file that `fxpar compile -o` wrote") from error
    return decode(data, where=str(path), sha256=sha256)
