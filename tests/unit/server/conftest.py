"""A data folder with runs that have ended, made once, and a dashboard of it."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from mlbench_cli import __version__
from mlbench_cli.model.run import Cluster, Experiment, Member, Run
from mlbench_cli.storage.store import Store
from mlbench_cli.tasks.provenance import Provenance
from tests.unit.results.runs import START, record_sealed

SAMPLES = "".join(
    f'{{"time": {START + second}, "rank": {rank}, "cpu_seconds": {0.5 * second}, "rss_bytes": {1 << 20}}}\n'
    for second in range(1, 4)
    for rank in (0, 1)
)


@dataclass(frozen=True)
class Ended:
    """The data folder, and the runs in it by name, the oldest first."""

    home: Path
    runs: dict[str, Run]


@pytest.fixture(scope="session")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Two runs of the experiment "study" on this machine, and one on the cluster "far" that failed."""
    home = tmp_path_factory.mktemp("home")
    store = Store(home)
    store.record_cluster(Cluster("far", "attached", details={"nodes": 3}))
    words = Provenance(
        __version__, "3.12.1", command_line=("mlbench", "run", "study", "1", "2", "--set", "a b")
    ).to_dict()
    runs = [
        record_sealed(store, "study-1", 1, 90.0, provenance=words),
        record_sealed(store, "study-2", 2, 60.0, samples=SAMPLES, argv=("python", "a b.py")),
        record_sealed(store, "bad", 2, 30.0, "failed", cluster="far", engine="kubernetes"),
    ]
    members = tuple(Member(number, run.id, run.spec.content_hash) for number, run in enumerate(runs[:2]))
    store.record_experiment(Experiment("e1", "study", "2026-01-01T00:00:00.000Z", {"name": "study"}, members), ())
    store.close()
    return Ended(home, {run.name: run for run in runs})
