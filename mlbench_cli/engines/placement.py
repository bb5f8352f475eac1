"""Which node executes which workers and parameter servers. Pure: the same spec gives the same nodes."""

from collections.abc import Sequence
from typing import TypedDict

from msgspec import Struct
from msgspec.structs import replace

from mlbench_cli.errors import CapacityError
from mlbench_cli.model.spec import RunSpec


class HostRecord(TypedDict):
    """One host: `login` as ssh knows it, `address` at which the other hosts reach it."""

    name: str
    login: str
    slots: int
    address: str
    interface: str | None


class NodeShare(Struct, frozen=True):
    """What one node runs: workers and parameter servers, each by number. Name and address are None if only it knows."""

    workers: tuple[int, ...]
    servers: tuple[int, ...] = ()
    name: str | None = None
    address: str | None = None

    def ranks(self, spec: RunSpec) -> list[int]:
        """Ranks of the node's workers, then those of its servers, which come after all ranks of workers."""
        each = spec.processes_per_worker
        own = [rank for worker in self.workers for rank in range(worker * each, (worker + 1) * each)]
        return [*own, *(spec.world_size + server for server in self.servers)]


def share_nodes(spec: RunSpec) -> list[NodeShare]:
    """One node for each worker; parameter servers run beside the workers, in turn."""
    shares = [NodeShare((worker,)) for worker in range(spec.workers)]
    return _add_servers(shares, spec, range(spec.workers))


def share_hosts(hosts: Sequence[HostRecord], spec: RunSpec) -> list[NodeShare]:
    """Nodes on these hosts: as mpirun does, the slots of one host before those of the next. Workers that test their
    hosts have one each.

    Parameter servers run beside the workers, in turn. Raises CapacityError if there are not enough slots.
    """
    if names := spec.nodes:
        hosts = sorted((host for host in hosts if host["name"] in names), key=lambda host: names.index(host["name"]))
    if spec.absent_seconds is not None:
        hosts = [{**host, "slots": 1} for host in hosts]
    shares = _place_workers(hosts, spec.workers)
    return _add_servers(shares, spec, range(len(shares)))


def _place_workers(hosts: Sequence[HostRecord], workers: int) -> list[NodeShare]:
    shares = []
    first = 0
    for host in hosts:
        own = tuple(range(first, min(first + host["slots"], workers)))
        if own:
            shares.append(NodeShare(own, name=host["name"], address=host["address"]))
        first += host["slots"]
    if first < workers:
        raise CapacityError(
            f"{workers} workers, but the hosts have {first} slots.",
            hint="Use fewer workers, or attach more hosts: mlbench attach-hosts NAME --hosts ...",
        )
    return shares


def _add_servers(shares: list[NodeShare], spec: RunSpec, nodes: range) -> list[NodeShare]:
    """The shares with the run's parameter servers on these nodes, in turn."""
    for server in range(spec.servers):
        node = nodes[server % len(nodes)]
        shares[node] = replace(shares[node], servers=(*shares[node].servers, server))
    return shares
