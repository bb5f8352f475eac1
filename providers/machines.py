"""Slurm clusters and plain hosts: machines that mlbench uses and never creates. They have no Kubernetes."""

from collections.abc import Mapping, Sequence

from mlbench_cli.errors import UsageError
from mlbench_cli.kube.access import Access
from mlbench_cli.model import Cluster
from providers.base import Resource


class MachinesProvider:
    """The provider "slurm" or "hosts": nothing to create, find or delete."""

    name = "machines"

    def resources(self, cluster: Cluster) -> Sequence[Resource]:
        return ()

    def discover(self, scope: Mapping[str, str]) -> list[Cluster]:
        return []

    def connect(self, cluster: Cluster) -> Access:
        raise UsageError(
            f'The cluster "{cluster.name}" has no Kubernetes API: it is one of {cluster.provider}.',
            hint="mlbench list-clusters",
        )


class SlurmProvider(MachinesProvider):
    name = "slurm"


class HostsProvider(MachinesProvider):
    name = "hosts"
