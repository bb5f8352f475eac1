"""Machines that mlbench uses and never creates: this one, Slurm clusters, plain hosts. They have no Kubernetes."""

from collections.abc import Mapping, Sequence

from mlbench_cli.errors import UsageError
from mlbench_cli.kube.access import Access
from mlbench_cli.model.run import Cluster
from providers.base import Provider, Resource


class MachinesProvider(Provider):
    """Nothing to create, find or delete."""

    name = "machines"

    def resources(self, cluster: Cluster) -> Sequence[Resource]:
        """Nothing: these machines are neither created nor deleted."""
        return ()

    def discover(self, scope: Mapping[str, str]) -> list[Cluster]:
        """Nothing: such clusters are known by the store of the machine that attached them."""
        return []

    def connect(self, cluster: Cluster) -> Access:
        """Raise UsageError: there is no Kubernetes API to open."""
        raise UsageError(
            f'The cluster "{cluster.name}" has no Kubernetes API: it is a {cluster.provider} cluster.',
            hint="mlbench list-clusters",
        )


class LocalProvider(MachinesProvider):
    """The provider "local": this machine, the cluster that always exists."""

    name = "local"


class SlurmProvider(MachinesProvider):
    """The provider "slurm": a Slurm cluster, attached by `mlbench attach-slurm`."""

    name = "slurm"


class HostsProvider(MachinesProvider):
    """The provider "hosts": hosts that ssh reaches, attached by `mlbench attach-hosts`."""

    name = "hosts"
