"""This machine: the cluster that always exists. It has no resources and no Kubernetes."""

from collections.abc import Mapping, Sequence

from mlbench_cli.errors import UsageError
from mlbench_cli.kube.access import Access
from mlbench_cli.model.run import Cluster
from providers.base import Resource


class LocalProvider:
    """The provider "local": this machine, which has no resources and no API."""

    name = "local"

    def resources(self, cluster: Cluster) -> Sequence[Resource]:
        """Nothing: this machine is neither created nor deleted."""
        return ()

    def discover(self, scope: Mapping[str, str]) -> list[Cluster]:
        """Nothing: this machine is always known."""
        return []

    def connect(self, cluster: Cluster) -> Access:
        """Raise UsageError: local runs are processes."""
        raise UsageError('The cluster "local" has no Kubernetes API: its runs are processes.')
