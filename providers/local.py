"""This machine: the cluster that always exists. Nothing is made for it, and it has no Kubernetes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlbench_cli.errors import UsageError
from mlbench_cli.kube.access import Access
from mlbench_cli.model import Cluster
from providers.base import Plan, Resource


@dataclass(frozen=True)
class NoOptions:
    """It takes none."""


class LocalProvider:
    name = "local"
    options = NoOptions

    def new_cluster(self, name: str, nodes: int, options: NoOptions) -> Cluster:
        raise UsageError('The cluster "local" is this machine and always exists.', hint="mlbench set-cluster local")

    def plan(self, cluster: Cluster) -> Plan:
        return Plan((), location="this machine")

    def resources(self, cluster: Cluster) -> Sequence[Resource]:
        return ()

    def discover(self, scope: Mapping[str, str]) -> list[Cluster]:
        return []

    def connect(self, cluster: Cluster) -> Access:
        raise UsageError('The cluster "local" has no Kubernetes API: its runs are processes.')

    def scale(self, cluster: Cluster, nodes: int) -> Sequence[Resource]:
        raise UsageError('The cluster "local" is this machine; it cannot be scaled.')
