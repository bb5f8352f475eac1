"""What runs need to be followed: the store of a data folder, and the engine of each cluster."""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from mlbench_cli.agent.lock import find_holder
from mlbench_cli.engines.base import Engine
from mlbench_cli.engines.local.engine import LocalEngine
from mlbench_cli.model.run import LOCAL, Cluster, Run
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.storage.run_folder import RunFolder
from mlbench_cli.storage.store import Store

# Each of the other engines is imported for its own clusters: with the providers, tarfile, ssl and threads they would
# make the start of a local run 40 ms longer.

Notice = Callable[[str], None]
FINALIZER = "mlbench_cli.runs.finalize"


def connect_engine(cluster: Cluster, report: Callable[[str], None] | None = None) -> Engine:
    """The engine of `cluster`. Sends no request yet. Raises MlbenchError if there is no access to the cluster.

    `report` is called with a sentence while a run waits for this machine, or its objects for a cluster to delete them.
    """
    if cluster.engine == "local":
        return LocalEngine(finalizer=FINALIZER, report=report)
    if cluster.engine == "slurm":
        from mlbench_cli.engines.machines.details import SlurmDetails
        from mlbench_cli.engines.slurm.engine import SlurmEngine

        return SlurmEngine(SlurmDetails.of(cluster))
    if cluster.engine == "hosts":
        from mlbench_cli.engines.hosts.engine import HostsEngine
        from mlbench_cli.engines.machines.details import HostsDetails

        return HostsEngine(HostsDetails.of(cluster))
    from mlbench_cli.engines.kubernetes.engine import KubernetesEngine
    from providers import registry

    return KubernetesEngine(registry.load(cluster.provider).connect(cluster), report)


class EnginesByCluster:
    """The engine of a run's cluster, made once for each cluster.

    A sealed run gets the local engine, because everything is read from its folder.
    """

    def __init__(
        self,
        store: Store,
        report: Callable[[str], None] | None = None,
        connect: Callable[[Cluster], Engine] | None = None,
    ) -> None:
        """`connect` makes the engine of a cluster; default: the one that executes runs there."""
        self._store = store
        self._report = report
        self._connect = connect or (lambda cluster: connect_engine(cluster, report))
        self._engines: dict[str, Engine] = {}

    def __call__(self, run: Run) -> Engine:
        if RunFolder(run.folder).is_sealed:
            return connect_engine(LOCAL, self._report)
        return self.of_cluster(run.spec.cluster)

    def of_cluster(self, name: str) -> Engine:
        """The engine of the cluster of that name. Raises NotFoundError."""
        if name not in self._engines:
            self._engines[name] = self._connect(self._store.cluster(name))
        return self._engines[name]


class Workspace:
    """A data folder that is open. `home` is the folder; default: as the commands'.

    `notice` gets the sentences that the commands print on stderr. `patience`: seconds to wait for a store that another
    process has locked, before StoreLockedError; default: 30, or what MLBENCH_STORE_PATIENCE says.
    """

    def __init__(
        self, home: Path | str | None = None, *, notice: Notice | None = None, patience: float | None = None
    ) -> None:
        folder = None if home is None else Path(home)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self.store = Store(folder, notice=notice, patience=patience)
        self.notice = notice

    def notify(self, text: str) -> None:
        """Hand a sentence to `notice`."""
        if self.notice is not None:
            self.notice(text)

    def require_readable(self) -> None:
        """Raise StoreError if a newer mlbench has written the store since it was opened."""
        self.store.require_readable()

    def close(self) -> None:
        """Close the store. Nothing of the workspace is used after that."""
        self.store.close()

    @cached_property
    def engine_of(self) -> EnginesByCluster:
        """A function from a run to the engine that executes it; one engine per cluster."""
        return EnginesByCluster(self.store, self.notice)


def connect_renderer(cluster: Cluster, report: Callable[[str], None] | None = None) -> Engine:
    """An engine that can only render for `cluster`: --dry-run needs neither network nor credentials."""
    if cluster.engine != "kubernetes" or cluster.is_attached:  # an attached one's access is read from a file
        return connect_engine(cluster, report)
    from mlbench_cli.engines.kubernetes.engine import KubernetesEngine
    from mlbench_cli.kube.access import Access

    return KubernetesEngine(Access("https://nowhere.invalid", cluster.details.get("namespace") or "default"))


def find_machine_holder(spec: RunSpec) -> str | None:
    """The run that uses this machine, for which a local run has to wait; None if it can start, or runs elsewhere."""
    if spec.engine != "local" or spec.share_machine:
        return None
    holder = find_holder()
    return None if holder is None else holder.phrase
