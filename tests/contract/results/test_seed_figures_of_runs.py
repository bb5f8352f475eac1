"""The figures of the documentation's table from real runs of shipped tasks, on this machine."""

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from mlbench_cli.model.run import LOCAL
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.results.archive.record import write_run_document
from mlbench_cli.results.archive.seal import seal
from mlbench_cli.results.archive.verify import verify
from mlbench_cli.results.figures.chart import Chart
from mlbench_cli.runs.launch import resolve
from mlbench_cli.runs.request import Request
from tests.contract.local_runs import Lab
from tests.unit.results.report.test_seed_figures import draw_all, read_table

PRICE = {"per_hour": 1.5, "currency": "USD", "source": "a table"}
CIFAR = {"task": "cifar10_resnet20", "preset": "tiny", "set": {"goal_full": 15.0, "goal_light": 12.0}}
REQUESTS: dict[str, dict[str, Any]] = {
    "epsilon": {"task": "epsilon_logistic_regression", "preset": "tiny", "workers": (1, 2)},
    "spent": {
        "task": "epsilon_logistic_regression",
        "preset": "tiny",
        "workers": (1, 2),
        "budget": "3s",
        "set": {"epochs": 100000},
    },
    "cifar": {**CIFAR, "workers": (2,)},
    "reduce": {"task": "allreduce", "preset": "tiny", "workers": (2,)},
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    lab = Lab(tmp_path_factory.mktemp("home"))
    yield lab
    lab.close()


@pytest.fixture(scope="module")
def archives(lab: Lab) -> list[Archive]:
    found = []
    for name, options in REQUESTS.items():
        for spec in resolve(Request(name=name, backend="gloo", **options), LOCAL):
            made = lab.store.record_run(replace(spec, price=PRICE, share_machine=True))
            write_run_document(made)
            lab.runs.append(made)
            lab.engine.submit(made, lab.engine.render(made.spec))
            seal(made, lab.end(made))
            assert verify(made.folder).ok
            found.append(Archive.open(made.folder))
    return found


@pytest.fixture(scope="module")
def drawn(archives: list[Archive]) -> dict[str, list[Chart]]:
    """The figures of all tasks by their key."""
    return draw_all(archives)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_every_figure_of_the_table_comes_from_a_run_of_a_shipped_task(drawn: dict[str, list[Chart]]) -> None:
    wanted = {keys[0] for _, keys, _ in read_table() if not keys[-1].endswith("csv")}
    assert wanted <= drawn.keys(), sorted(wanted - drawn.keys())
