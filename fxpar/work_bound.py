"""A bound on every plan of a model on a cluster: of any mesh, stages, microbatches, schedule and overlap.

Whatever the placement, all ranks together do at least the work of one device that runs the step alone: every multiply
and every byte of it on some rank. A rank's op takes at least sqrt(f^2 + b^2) (see ``compute_ns`` of fxpar.cost.compute;
launches, collectives, waiting and repeated work come on top), and sqrt(F^2 + B^2) of the sums is at most the sum of the
ranks' sqrt(f^2 + b^2). The busiest rank takes no less than the average one:

    step >= sum over ops of sqrt(F^2 + B^2) / ranks

A program of one microbatch runs as often as there are microbatches. What it moves may be more than what the program
of the whole batch moves (weights are read again), so of it only multiplications count, which are the same for any
number of microbatches.
"""

from __future__ import annotations

import math
from functools import cache

from fxpar.cost.cluster import Cluster
from fxpar.plans.mesh import Axis, Mesh
from fxpar.plans.program import Program
from fxpar.prices import local_work
from fxpar.rules.choices import Site, choice_by_names, sites_of

ALONE = Mesh((Axis("a0", 1),))


def least_step_ns(program: Program, cluster: Cluster) -> int:
    """ns that a step of the program takes at least on all devices of the cluster, at the cluster's rates, rounded
    down; 0 where nothing is known of its work."""
    device = cluster.device

    @cache
    def alone_ns(site: Site) -> float:
        choice = choice_by_names(site, (".",), ALONE)
        if choice is None or choice.expands:
            return 0.0
        work = local_work(site, choice, ALONE)
        if work.kind == "view":
            return 0.0
        moved = work.bytes * 1e9 / (device.memory_bandwidth * device.efficiency_of("memory", work.dtype))
        if work.kind == "memory":
            return 0.0 if program.time is not None else moved
        peak = device.peak_flops.get(work.dtype, device.peak_flops["float32"])
        worked = work.flops * 1e9 / (peak * device.efficiency_of(work.kind, work.dtype))
        return worked if program.time is not None else math.hypot(worked, moved)

    times = 1 if program.time is None else program.time.count
    return int(math.fsum(map(alone_ns, sites_of(program))) * times / cluster.world_size)
