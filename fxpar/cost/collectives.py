"""How long a collective over mesh axes takes: alpha-beta on the links that the group's ranks have between them.

Every group of an axis runs its collective at the same time, so a rate is always what one device has when all use the
link. Formulas and latency terms follow NCCL's own tuning model (rings with a cost per hop inside a node and a larger
one between nodes, double binary trees, reduction in the switch), with the shares measured by nccl-tests.
"""

import math
from functools import lru_cache
from itertools import product
from typing import Literal, NamedTuple

from fxpar.cost.cluster import Cluster, Protocol
from fxpar.plans.errors import FxparError

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]


class GroupTopology(NamedTuple):
    """How one group of ranks lies on the cluster.

    Attributes:
        size: ranks in the group.
        nodes: nodes it spans.
        ranks_per_node: ranks on the node that holds the fewest of them, where the way out is narrowest.
    """

    size: int
    nodes: int
    ranks_per_node: int


def axis_link(cluster: Cluster, mesh_sizes: tuple[int, ...], axis: int | tuple[int, ...]) -> GroupTopology:
    """Where the groups of one or several mesh axes lie.

    Args:
        mesh_sizes: sizes of the mesh axes, outermost first. Ranks are numbered row by row and fill the nodes in order.
        axis: the axis, or the axes together, along which a group extends.

    Returns the worst of the groups (most nodes, then fewest ranks on one of them), since all have to finish.

    Raises:
        FxparError: the mesh has more ranks than the cluster has devices.
    """
    axes = (axis,) if isinstance(axis, int) else tuple(sorted(set(axis)))
    if any(not 0 <= one < len(mesh_sizes) for one in axes):
        raise IndexError(f"axes {axes} of a mesh of {len(mesh_sizes)} axes")
    ranks = math.prod(mesh_sizes)
    if ranks > cluster.world_size:
        raise FxparError(
            f"a mesh of {'x'.join(map(str, mesh_sizes))} needs {ranks} devices, the cluster has {cluster.world_size}",
            way_out="a smaller mesh, or a larger --cluster",
        )
    return _group_topology(cluster.devices_per_node, tuple(mesh_sizes), axes)


@lru_cache(maxsize=4096)
def _group_topology(per_node: int, mesh_sizes: tuple[int, ...], axes: tuple[int, ...]) -> GroupTopology:
    strides = [math.prod(mesh_sizes[dim + 1:]) for dim in range(len(mesh_sizes))]
    offsets = [sum(at * strides[one] for at, one in zip(coordinate, axes, strict=True))
               for coordinate in product(*(range(mesh_sizes[one]) for one in axes))]
    others = [dim for dim in range(len(mesh_sizes)) if dim not in axes]
    worst = GroupTopology(len(offsets), 1, len(offsets))
    for coordinate in product(*(range(mesh_sizes[dim]) for dim in others)):
        first = sum(at * strides[dim] for at, dim in zip(coordinate, others, strict=True))
        ranks_on: dict[int, int] = {}
        for offset in offsets:
            node = (first + offset) // per_node
            ranks_on[node] = ranks_on.get(node, 0) + 1
        found = GroupTopology(len(offsets), len(ranks_on), min(ranks_on.values()))
        if (found.nodes, -found.ranks_per_node) > (worst.nodes, -worst.ranks_per_node):
            worst = found
    return worst


def collective_ns(
    cluster: Cluster,
    mesh_sizes: tuple[int, ...],
    axis: int | tuple[int, ...],
    kind: CollectiveKind,
    bytes: int,
) -> int:
    """Nanoseconds of one collective along mesh axes, rounded up; 0 for a group of one.

    Args:
        mesh_sizes, axis: as in `axis_link`.
        kind: "send" is from each rank to its neighbour along the axis.
        bytes: the full tensor on one rank: what all_gather yields, what reduce_scatter, all_reduce, broadcast and send
            are given, and what each rank of an all_to_all holds.

    Raises:
        FxparError: the mesh does not fit the cluster.
    """
    if bytes < 0:
        raise ValueError(f"a collective of {bytes} bytes")
    group = axis_link(cluster, mesh_sizes, axis)
    if group.size == 1:
        return 0
    return math.ceil(group_ns(cluster, group, kind, bytes))


def group_ns(cluster: Cluster, group: GroupTopology, kind: CollectiveKind, bytes: int) -> float:
    """Nanoseconds of a collective in a group of at least two ranks: the fastest of the algorithms and protocols."""
    by_name = {protocol.name: protocol for protocol in cluster.inter.protocols}
    times: list[float] = []
    for near in cluster.intra.protocols:
        # Inside one node a protocol that the network lacks will do; across nodes both levels must speak it.
        far = by_name.get(near.name, near if group.nodes == 1 else None)
        if far is None:
            continue
        if kind == "all_to_all":
            times.append(_all_to_all_ns(cluster, group, near, far, bytes))
        elif kind == "send":
            times.append(_send_ns(cluster, group, near, far, bytes))
        else:
            times.append(_ring_ns(cluster, group, near, far, kind, bytes))
            if kind == "all_reduce" and group.nodes > 1:
                times.append(_tree_ns(cluster, group, near, far, bytes))
    switch = _switch_ns(cluster, group, kind, bytes)
    return min(times if switch is None else [*times, switch])


def _near_rate(cluster: Cluster, group: GroupTopology, kind: str, protocol: Protocol) -> float:
    """Bytes per nanosecond of one device within its node."""
    link = cluster.intra
    local = -(-group.size // group.nodes)
    return link.bandwidth * link.efficiency[kind] * link.factor_for(local) * protocol.efficiency / 1e9


def _far_rate(cluster: Cluster, group: GroupTopology, kind: str, protocol: Protocol) -> float:
    """Bytes per nanosecond that the group's ranks on one node have together out of it.

    Only their own part of the NICs: the node's other ranks are in other groups, which send at the same time.
    """
    link = cluster.inter
    return group.ranks_per_node * link.bandwidth * link.efficiency[kind] * link.factor_for(group.nodes) \
        * protocol.efficiency / 1e9


def _ring_ns(
    cluster: Cluster, group: GroupTopology, near: Protocol, far: Protocol, kind: CollectiveKind, bytes: int
) -> float:
    """A ring through all ranks that enters and leaves each node once, a channel for every rank of the node.

    Each of `rounds` trips around it takes size - 1 hops, of which nodes - 1 leave a node, and moves
    bytes * (size - 1) / size past every link. The parts inside and between nodes overlap, so the narrower one counts.
    """
    rounds = 2 if kind == "all_reduce" else 1
    rates = []
    if group.ranks_per_node > 1 or group.nodes < group.size:
        rates.append(_near_rate(cluster, group, kind, near))
    if group.nodes > 1:
        rates.append(_far_rate(cluster, group, kind, far))
    # A broadcast is handed on whole: no rank starts out with a part of it.
    wire = float(bytes) if kind == "broadcast" else rounds * bytes * (group.size - 1) / group.size
    return _ring_latency(group, near, far, rounds) + wire / min(rates)


def _ring_latency(group: GroupTopology, near: Protocol, far: Protocol, rounds: int) -> float:
    base = far.base_ns if group.nodes > 1 else near.base_ns
    far_hops = group.nodes - 1
    return base + rounds * (float(group.size - 1 - far_hops) * near.hop_ns + float(far_hops) * far.hop_ns)


def _tree_ns(cluster: Cluster, group: GroupTopology, near: Protocol, far: Protocol, bytes: int) -> float:
    """All-reduce over nodes: reduced within the node, over a double binary tree of nodes, and handed out again.

    Up and down together each node sends the tensor twice, but between two nodes only once: they exchange. With a
    reducing switch the part inside the node runs in it. The stages overlap chunk by chunk; the best chunk leaves
    sqrt(latency * transfer) to pay, as in every pipeline.
    """
    depth = (group.nodes - 1).bit_length()
    local = -(-group.size // group.nodes)
    crossings = 1 if group.nodes == 2 else 2
    between = crossings * bytes / _far_rate(cluster, group, "all_reduce", far)
    latency = far.base_ns + 2 * (float(local - 1) * near.hop_ns + float(depth) * far.hop_ns)
    if local == 1:
        return _pipelined(latency, between)
    within = 2 * bytes / _near_rate(cluster, group, "all_reduce", near)
    times = [_pipelined(latency, max(within, between))]
    switch = cluster.intra.switch_reduce
    if switch is not None and local >= switch.min_ranks:
        within = bytes * 1e9 / (cluster.intra.bandwidth * switch.efficiency)
        latency = switch.base_ns + 2 * (float(depth) * far.hop_ns)
        times.append(_pipelined(latency, max(within, between)))
    return min(times)


def _switch_ns(cluster: Cluster, group: GroupTopology, kind: str, bytes: int) -> float | None:
    """All-reduce in the switch of one node: each rank sends its tensor once and receives the sum once."""
    switch = cluster.intra.switch_reduce
    if kind != "all_reduce" or switch is None or group.nodes > 1 or group.size < switch.min_ranks:
        return None
    return _pipelined(float(switch.base_ns), bytes * 1e9 / (cluster.intra.bandwidth * switch.efficiency))


def _pipelined(latency: float, transfer: float) -> float:
    return latency + transfer + math.sqrt(latency * transfer)


def _all_to_all_ns(cluster: Cluster, group: GroupTopology, near: Protocol, far: Protocol, bytes: int) -> float:
    """Every rank sends an equal part to each other rank, to those on its own node and elsewhere at once."""
    at_home = group.ranks_per_node - 1
    away = group.size - group.ranks_per_node if group.nodes > 1 else 0
    within = between = 0.0
    if group.nodes < group.size:
        local = at_home if group.nodes > 1 else group.size - 1
        within = bytes * local / group.size / _near_rate(cluster, group, "all_to_all", near)
    if group.nodes > 1:
        # _far_rate is that of all the group's ranks on a node, each of which has this much to send away.
        between = bytes * away / group.size * group.ranks_per_node / _far_rate(cluster, group, "all_to_all", far)
        latency = float(far.base_ns + far.hop_ns)
    else:
        latency = float(near.base_ns + near.hop_ns)
    peer = cluster.inter.peer_ns if group.nodes > 1 else cluster.intra.peer_ns
    return latency + float(group.size - 2) * peer + max(within, between)


def _send_ns(cluster: Cluster, group: GroupTopology, near: Protocol, far: Protocol, bytes: int) -> float:
    """To the neighbour along the axis; where the axis leaves a node, some pair has to, and the others wait for it."""
    if group.nodes == 1:
        return near.base_ns + near.hop_ns + bytes / _near_rate(cluster, group, "send", near)
    alone = group._replace(ranks_per_node=1)
    return far.base_ns + far.hop_ns + bytes / _far_rate(cluster, alone, "send", far)
