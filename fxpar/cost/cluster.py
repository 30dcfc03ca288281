"""The machine a plan is made for: devices, links and how they are arranged, read from TOML.

In: the text of `--cluster` ("2x8:h100", "4", "mycluster.toml"). Out: a `Cluster`. Presets live in `fxpar/hardware`,
one TOML a machine, each number with its source beside it.
"""

import math
import re
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from fxpar.plans.errors import FxparError

Positive = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=1, le=65536)]
Nanoseconds = Annotated[int, Meta(ge=0, le=10**12)]
# A fraction of a peak; above 1 it would promise more than the hardware has.
Fraction = Annotated[float, Meta(gt=0, le=1)]

OP_CLASSES = ("matmul", "attention", "conv", "memory")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")
# A base of a base of a base ... of itself must end somewhere.
_MAX_BASES = 4
_MAX_DEVICES = 65536


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One accelerator (or one CPU rank).

    Attributes:
        memory_bytes: bytes of device memory.
        memory_bandwidth: bytes per second, as on the data sheet; `efficiency["memory"]` of it is reached.
        launch_ns: time every kernel costs beyond its work: launch, ramp-up, tail.
        peak_flops: dense peak in flop/s by dtype ("float32", "bfloat16", "tfloat32" ...); needs "float32", which also
            stands for every dtype not listed.
        efficiency: share of the peak reached by a large op of a class (matmul, attention, conv, memory). A key
            "matmul.tfloat32" overrides its class for one dtype.
        ramp: by dtype, how slowly matmuls reach that share as they grow; 0 (none) unless listed. See `compute_ns`.
    """

    name: str
    memory_bytes: Annotated[int, Meta(ge=1, le=2**60)]
    memory_bandwidth: Positive
    launch_ns: Nanoseconds
    peak_flops: dict[str, Positive]
    efficiency: dict[str, Fraction]
    ramp: dict[str, Annotated[float, Meta(ge=0)]] = {}

    def __post_init__(self) -> None:
        if "float32" not in self.peak_flops:
            raise ValueError("`peak_flops` needs a rate for float32")
        missing = [op_class for op_class in OP_CLASSES if op_class not in self.efficiency]
        if missing:
            raise ValueError(f"`efficiency` lacks {', '.join(missing)}")
        for key in self.efficiency:
            op_class, _, dtype = key.partition(".")
            if op_class not in OP_CLASSES or (dtype and dtype not in self.peak_flops):
                raise ValueError(f"`efficiency` has {key!r}: expected CLASS or CLASS.DTYPE of {', '.join(OP_CLASSES)}")
        _refuse_infinite(self.memory_bandwidth, *self.peak_flops.values(), *self.ramp.values())

    def efficiency_of(self, op_class: str, dtype: str) -> float:
        """Share of the peak that a large op of this class and dtype reaches."""
        return self.efficiency.get(f"{op_class}.{dtype}", self.efficiency[op_class])


class Protocol(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One way of sending over a link: what a call and a hop cost, and the share of the link it can use."""

    name: str
    base_ns: Nanoseconds
    hop_ns: Nanoseconds
    efficiency: Fraction = 1.0


class SwitchReduce(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All-reduce inside the switch (NVLink SHARP): tensor bytes per second as a share of the link's bandwidth."""

    efficiency: Fraction
    base_ns: Nanoseconds
    min_ranks: Count


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A level of the network, seen from one device that all others use at the same time.

    Attributes:
        bandwidth: bytes per second per device and direction; where devices share a NIC, their part of it.
        efficiency: share of the bandwidth a large collective reaches, for each of COLLECTIVES.
        protocols: at least one; the cheapest is taken. Names pair them up across levels.
        peer_ns: cost of each further peer of an all-to-all.
        size_factor: (ranks, factor) pairs by rising ranks: groups of at most that many ranks reach only factor of it.
        switch_reduce: all-reduce in the switch, where there is one.
    """

    name: str
    bandwidth: Positive
    efficiency: dict[str, Fraction]
    protocols: Annotated[tuple[Protocol, ...], Meta(min_length=1)]
    peer_ns: Nanoseconds = 0
    size_factor: tuple[tuple[Count, Fraction], ...] = ()
    switch_reduce: SwitchReduce | None = None

    def __post_init__(self) -> None:
        missing = [kind for kind in COLLECTIVES if kind not in self.efficiency]
        if missing:
            raise ValueError(f"`efficiency` lacks {', '.join(missing)}")
        unknown = [kind for kind in self.efficiency if kind not in COLLECTIVES]
        if unknown:
            raise ValueError(f"`efficiency` has {', '.join(unknown)}: known are {', '.join(COLLECTIVES)}")
        _refuse_infinite(self.bandwidth)

    def factor_for(self, ranks: int) -> float:
        """Share of the bandwidth that a group of so many ranks can use at all."""
        return next((factor for limit, factor in self.size_factor if ranks <= limit), 1.0)


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Nodes of equal devices. Ranks fill nodes: rank r is device r % devices_per_node of node r // devices_per_node.

    Attributes:
        intra, inter: the links within a node and between nodes.
        reserve_bytes: device memory a plan must leave alone (driver, communicator buffers, fragmentation).
        origin: where its numbers come from, shown beside every number made from them.
    """

    name: str
    nodes: Count
    devices_per_node: Count
    device: Device
    intra: Link
    inter: Link
    reserve_bytes: Annotated[int, Meta(ge=0, le=2**60)]
    origin: Literal["published", "measured", "unverified"]

    def __post_init__(self) -> None:
        if self.nodes * self.devices_per_node > _MAX_DEVICES:
            raise ValueError(f"{self.nodes} x {self.devices_per_node} devices are more than {_MAX_DEVICES}")
        if not {p.name for p in self.intra.protocols} & {p.name for p in self.inter.protocols}:
            raise ValueError("`intra` and `inter` share no protocol name")

    @property
    def world_size(self) -> int:
        """Number of devices, which is the number of ranks."""
        return self.nodes * self.devices_per_node

    @property
    def usable_bytes(self) -> int:
        """Bytes of one device that a plan may fill."""
        return max(0, self.device.memory_bytes - self.reserve_bytes)


def preset_names() -> tuple[str, ...]:
    """Names that may follow the colon of `--cluster`, sorted."""
    return tuple(sorted(entry.name[:-5] for entry in files("fxpar").joinpath("hardware").iterdir()
                        if entry.name.endswith(".toml")))


def parse_cluster(text: str) -> Cluster:
    """The cluster that `--cluster` names.

    Args:
        text: "NODESxDEVICES:NAME" or "DEVICES:NAME" (one node), where NAME is a preset or a TOML file; "DEVICES" alone
            is that many CPU ranks; a TOML file alone is taken as it stands. In a file, `base = "PRESET"` starts from
            a preset and the file's own fields override it.

    Raises:
        FxparError: the form, the preset or the file is unknown, or a field of the file is wrong (its path is named).
    """
    match = re.fullmatch(r"(?:([0-9]{1,6})x)?([0-9]{1,6})(?::(.+))?", text)
    if match is None and text.endswith(".toml"):
        return _build(_fields(text, 0), text)
    if match is None:
        raise FxparError(
            f"cannot read the cluster {text!r}",
            way_out=f"write NODESxDEVICES:NAME such as 2x8:h100, a TOML file, or a number of CPU ranks; "
                    f"known names: {', '.join(preset_names())}",
        )
    name = match[3] or "cpu"
    fields = _fields(name, 0)
    fields["nodes"] = int(match[1] or 1)
    fields["devices_per_node"] = int(match[2])
    return _build(fields, text)


def _build(fields: dict[str, Any], where: str) -> Cluster:
    try:
        return msgspec.convert(fields, Cluster)
    except msgspec.ValidationError as error:
        raise FxparError(f"the cluster {where} is not valid: {error}") from error


def _fields(name: str, depth: int) -> dict[str, Any]:
    """The fields of a preset or file, its bases merged in."""
    if depth > _MAX_BASES:
        raise FxparError(f"the cluster {name} has more than {_MAX_BASES} bases above it", way_out="look for a circle")
    try:
        if name.endswith(".toml"):
            text = Path(name).read_text(encoding="utf-8")
        else:
            # The name is looked up, never joined into a path unseen.
            if name not in preset_names():
                raise FxparError(f"no cluster preset is called {name!r}",
                                 way_out=f"known: {', '.join(preset_names())}; or name a TOML file")
            text = files("fxpar").joinpath("hardware", f"{name}.toml").read_text(encoding="utf-8")
        own = tomllib.loads(text)
    except OSError as error:
        raise FxparError(f"cannot read the cluster file {name}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FxparError(f"the cluster file {name} is not TOML: {error}") from error
    base = own.pop("base", None)
    if base is None:
        return own
    if not isinstance(base, str):
        raise FxparError(f"the cluster {name} is not valid: Expected `str`, got {type(base).__name__} - at `$.base`")
    return _merge(_fields(base, depth + 1), own)


def _merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on top of `under`, table by table; arrays are replaced whole."""
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _refuse_infinite(*numbers: float) -> None:
    # TOML knows inf and nan, and a comparison bound lets inf through.
    if not all(math.isfinite(number) for number in numbers):
        raise ValueError("a rate is infinite or not a number")
