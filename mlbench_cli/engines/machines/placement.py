"""Which node executes which workers and parameter servers. Pure: the same spec gives the same nodes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mlbench_cli.engines.machines.details import HostRecord
from mlbench_cli.errors import CapacityError, UsageError, did_you_mean
from mlbench_cli.model.spec import RunSpec


@dataclass(frozen=True)
class NodeShare:
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
    """Nodes on these hosts: as mpirun does, the slots of one host before those of the next.

    Parameter servers run beside the workers, in turn, or on the hosts of `servers_on`, which then take no workers.
    Raises NotFoundError for a host that is not in the list, CapacityError if there are not enough slots.
    """
    reserved = find_server_hosts(hosts, spec)
    free = [host for host in hosts if host not in reserved]
    shares = _place_workers(free, spec.workers, bool(reserved))
    first = len(shares)
    shares += [NodeShare((), name=host["name"], address=host["address"]) for host in reserved]
    return _add_servers(shares, spec, range(first, len(shares)) if reserved else range(first))


def find_server_hosts(hosts: Sequence[HostRecord], spec: RunSpec) -> list[HostRecord]:
    """The hosts that are named for parameter servers, as many as have one to run."""
    by_name = {host["name"]: host for host in hosts}
    for name in spec.servers_on:
        if name not in by_name:
            raise UsageError(
                f'--servers-on: the cluster has no host "{name}", only {", ".join(by_name)}.'
                f"{did_you_mean(name, list(by_name))}",
                hint="mlbench list-clusters",
            )
    return [by_name[name] for name in spec.servers_on[: spec.servers]]


def _place_workers(hosts: Sequence[HostRecord], workers: int, is_reduced: bool) -> list[NodeShare]:
    shares = []
    first = 0
    for host in hosts:
        own = tuple(range(first, min(first + host["slots"], workers)))
        if own:
            shares.append(NodeShare(own, name=host["name"], address=host["address"]))
        first += host["slots"]
    if first < workers:
        besides = " apart from those of --servers-on" if is_reduced else ""
        raise CapacityError(
            f"{workers} workers, but the hosts have {first} slots{besides}.",
            hint="Use fewer workers, or attach more hosts: mlbench attach-hosts NAME --hosts ...",
        )
    return shares


def _add_servers(shares: list[NodeShare], spec: RunSpec, nodes: range) -> list[NodeShare]:
    """The shares with the run's parameter servers on these nodes, in turn."""
    for server in range(spec.servers):
        node = nodes[server % len(nodes)]
        shares[node] = replace(shares[node], servers=(*shares[node].servers, server))
    return shares
