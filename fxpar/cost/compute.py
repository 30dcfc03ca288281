"""How long one op takes on one device: launch floor plus a smooth roofline."""

import math
from typing import Literal, NamedTuple

from fxpar.cost.cluster import Device

WorkKind = Literal["matmul", "attention", "conv", "memory", "view"]


class Work(NamedTuple):
    """What one op does on one device.

    Attributes:
        kind: the class whose efficiency applies; "view" moves nothing.
        flops: multiplications and additions, each counted as one.
        bytes: device memory read and written.
        dtype: torch's name of the dtype the arithmetic runs in, without "torch."; "tfloat32" where float32 matmuls are
            allowed to use it.
    """

    kind: WorkKind
    flops: int
    bytes: int
    dtype: str


def compute_ns(device: Device, work: Work) -> int:
    """Nanoseconds of one op, rounded up.

        time = launch + sqrt(f^2 + b^2) + ramp * sqrt(f * launch)
        f = flops / (peak * efficiency),  b = bytes / (memory bandwidth * efficiency)

    The floor is added, never the larger of the two: work done twice must cost more even when it is small. The root of
    squares is the roofline with a rounded corner, which is where real matmuls lie: on the published H100 bf16 rates
    (256^3 to 4 x 2048 x 4096 x 4096) its median error is 2 %. f / time is then a smooth function of size that rises
    to `efficiency`. `ramp` covers kernels that fill the device slowly (TF32). Views cost nothing.
    """
    if work.kind == "view":
        return 0
    launch = float(device.launch_ns)
    moved = work.bytes * 1e9 / (device.memory_bandwidth * device.efficiency_of("memory", work.dtype))
    if work.kind == "memory":
        return math.ceil(launch + moved)
    # Integers, bool and dtypes without units of their own run at the rate of float32.
    peak = device.peak_flops.get(work.dtype, device.peak_flops["float32"])
    worked = work.flops * 1e9 / (peak * device.efficiency_of(work.kind, work.dtype))
    ramp = device.ramp.get(work.dtype, 0.0) * math.sqrt(worked * launch)
    return math.ceil(launch + math.sqrt(worked * worked + moved * moved) + ramp)
