"""This machine: the cluster that always exists. It has no resources and no Kubernetes."""

from collections.abc import Mapping, Sequence

from mlbench_cli.errors import UsageError
from mlbench_cli.kube.access import Access
from mlbench_cli.model import Cluster
from providers.base import Resource


class LocalProvider:
    name = "local"

    def resources(self, cluster: Cluster) -> Sequence[Resource]:
        return ()

    def discover(self, scope: Mapping[str, str]) -> list[Cluster]:
        return []

    def connect(self, cluster: Cluster) -> Access:
        raise UsageError('The cluster "local" has no Kubernetes API: its runs are processes.')
