"""The Python API, with real runs on this machine."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli import api
from mlbench_cli.api import Client
from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.model.run import ExperimentState, Outcome
from mlbench_cli.runs.request import Request
from tests.contract.local_runs import until
from tests.needs import needs

PROGRAM = r"""
import json, time
for epoch in (1, 2, 3):
    event = {"v": 1, "event": "metric", "rank": 0, "time": time.time(), "name": "loss", "value": 1 / epoch}
    event["epoch"] = epoch
    print("@mlbench", json.dumps(event), flush=True)
    print("epoch", epoch, flush=True)
"""
PATIENCE = 120.0


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with Client(tmp_path / "home") as found:
        yield found


@pytest.fixture
def command(tmp_path: Path) -> str:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return f"{sys.executable} {path}"


def test_a_run_is_started_followed_and_read(client: Client, command: str) -> None:
    experiment = client.run("demo", [1], command=command)
    (run,) = experiment.runs()
    last = list(run.follow(0.1))[-1]
    assert last.observation.ended
    finished = run.wait(PATIENCE)
    assert (finished.outcome, run.outcome, experiment.state) == (
        *(Outcome.COMPLETED, Outcome.COMPLETED),
        ExperimentState.COMPLETED,
    )
    assert [point.value for point in run.metrics(["loss"])] == pytest.approx([1, 1 / 2, 1 / 3])
    assert [point.epoch for point in run.metrics(last=1)] == [3]
    assert not run.metrics(since=run.metrics(last=1)[0].time + 1)
    assert [entry.text for entry in run.logs(0)] == [b"epoch 1\n", b"epoch 2\n", b"epoch 3\n"]
    assert run.archive().result["outcome"] == "completed"
    assert api.judge(run.folder).outcome is Outcome.COMPLETED
    assert run.status()["outcome"] == "completed"
    assert {sample.rank for sample in run.resources()} == {0}


def test_a_running_run_has_metrics_logs_and_can_be_canceled(client: Client, command: str) -> None:
    experiment = client.run("long", [1, 2], command=f"sh -c '{command}; sleep 600'")
    run = experiment.runs()[0]
    for _ in run.follow(0.1):
        if len(run.metrics()) == 3:
            break
    assert not run.is_finished
    assert run.is_running
    assert [entry.text for entry in run.logs(0, tail=1)] == [b"epoch 3\n"]
    experiment.cancel()
    assert run.outcome is Outcome.CANCELED
    until(lambda: experiment.state is ExperimentState.STOPPED)


def test_runs_are_found_newest_first_and_page_by_page(client: Client, command: str) -> None:
    client.run("demo", 1, command=command, repeat=3).wait(PATIENCE)
    names = [run.name for run in client.runs()]
    assert sorted(names) == ["demo-1-r1", "demo-1-r2", "demo-1-r3"]
    assert [run.name for run in client.runs(limit=1, offset=1)] == names[1:2]
    assert client.runs(states=["failed"]) == []
    assert [run.name for run in client.runs(contains="r2")] == ["demo-1-r2"]
    assert len(client.status(client.runs())["runs"]) == 3


def test_archives_are_compared_and_grouped(client: Client, command: str) -> None:
    experiment = client.run("demo", 1, command=command, repeat=2)
    experiment.wait(PATIENCE)
    archives = experiment.archives()
    assert len(api.series(archives).groups) == 1
    assert api.compare(archives[:1], archives[1:]).a == "demo-1-r1"
    assert [point.value for point in api.metrics_of(archives[0])] == pytest.approx([1, 1 / 2, 1 / 3])
    needs("pandas")
    rows = api.compare(archives[:1], archives[1:]).to_dict()["rows"]
    frame = experiment.runs().to_pandas()
    assert {name: list(frame[name]) for name in rows} == {
        name: [row["a"]["mean"], row["b"]["mean"]] for name, row in rows.items()
    }
    assert {"loss", "loss best", "seconds"} <= set(rows)
    assert list(frame["outcome"]) == ["completed", "completed"]


def test_a_download_is_the_archive_and_a_deleted_run_is_gone(client: Client, command: str, tmp_path: Path) -> None:
    (run,) = client.run("demo", 1, command=command).runs()
    run.wait(PATIENCE)
    for target in (tmp_path / "demo.zip", str(tmp_path / "again.zip")):
        with api.open_archive(run.download(target)) as archive:
            assert archive.run["id"] == run.run.id
    run.delete()
    with pytest.raises(NotFoundError):
        client.find_run("demo-1")
    assert client.experiments() == []


def test_options_have_the_types_of_an_experiment_file(client: Client, tmp_path: Path) -> None:
    options: dict[str, Any] = {"command": ["echo", "{x}"], "timeout": 90, "data_dir": tmp_path, "share_machine": True}
    options |= {"matrix": {"set.x": range(1, 4)}, "exclude": [{"set.x": 2}]}
    experiment = client.run("demo", 1, **options)
    experiment.wait(PATIENCE)
    assert [run.name for run in experiment.runs()] == ["demo-x1-1", "demo-x3-1"]
    assert {run.run.spec.timeout for run in client.runs(tasks="custom", states="completed")} == {90.0}


def test_a_launch_can_be_looked_at_before_it_is_recorded_and_followed_run_by_run(client: Client, command: str) -> None:
    launch = client.prepare(Request(name="demo", workers=(1,), command=command, repeat=2))
    assert [spec.name for spec in launch.specs] == ["demo-1-r1", "demo-1-r2"]
    assert [item.spec.name for item in launch.render(offline=True)] == ["demo-1-r1", "demo-1-r2"]
    assert (launch.is_known, client.runs(), client.experiments()) == (False, [], [])
    with launch.open() as opened:
        opened.record()
        assert [run.name for run in client.find_experiment("demo").runs()] == ["demo-1-r1", "demo-1-r2"]
        with pytest.raises(UsageError, match="is running"), client.prepare(launch.request).open():
            pass
        for run in opened.left:
            assert run.runs_here
            opened.start_run(run)
            assert run.wait(PATIENCE).outcome is Outcome.COMPLETED
    again = client.prepare(client.recall(Request(name="demo", repeat=3)))
    assert again.is_known
    with again.open() as opened:
        assert [run.name for run in opened.left] == ["demo-1-r3"]
        assert [run.is_finished for run in opened.runs] == [True, True, False]
    assert len(client.runs()) == 2  # what is not recorded leaves nothing


def test_members_that_another_client_adds_before_a_launch_is_opened_stay(client: Client, command: str) -> None:
    """For example while the first one asks whether to go on."""
    client.run("demo", [1], command=command, num_cpus=1).wait(PATIENCE)
    launch = client.prepare(Request(name="demo", workers=(1, 2), command=command, num_cpus=1))
    client.run("demo", [1, 3], command=command, num_cpus=1).wait(PATIENCE)
    launch.run_all()
    assert [run.name for run in client.find_experiment("demo").runs()] == ["demo-1", "demo-3", "demo-2"]


def test_an_archive_is_prepared_once_more(client: Client, command: str) -> None:
    client.run("demo", 1, command=command).wait(PATIENCE)
    launch = client.prepare_repetition("demo-1", Request(name="again"))
    assert [spec.name for spec in launch.specs] == ["again-1"]
    (finished,) = launch.start().wait(PATIENCE)
    assert (finished.run.name, finished.outcome) == ("again-1", Outcome.COMPLETED)
    with pytest.raises(UsageError, match="would change it"):
        client.prepare_repetition("demo-1", Request(name="more", workers=(2,)))


RUNS_FILE = """
title: Study
num-cpus: 1
share-machine: true
workers: [1]
repeat: 2
runs:
  - {name: good, command: "true"}
  - {name: bad, command: "false"}
"""


def test_a_file_of_runs_is_planned_run_and_tabulated(client: Client, tmp_path: Path) -> None:
    file = tmp_path / "study.yaml"
    file.write_text(RUNS_FILE)
    launch = client.prepare_file(str(file))
    plan = launch.plan()
    order = ["study-good-1-r1", "study-bad-1-r1", "study-good-1-r2", "study-bad-1-r2"]
    assert [run.name for run in plan.left] == order
    assert client.runs() == []
    launch.run_all()
    study = client.find_experiment("study")
    assert [run.name for run in study.runs()] == order
    rows = study.table()
    assert [(row.settings["series"], row.value(1) is None) for row in rows] == [("good", False), ("bad", True)]
    assert client.prepare_file(str(file)).plan().left == ()
    again = client.prepare_file("study")  # as it is recorded
    assert again.plan().left == ()
    again.run_all(retry_failed=True)
    assert [run.name for run in client.runs(contains="try2")] == ["study-bad-1-r2-try2", "study-bad-1-r1-try2"]


def test_a_client_in_another_thread_is_told_to_be_one_of_its_own(client: Client) -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(UsageError, match="cannot be used") as caught:
        pool.submit(client.runs).result()
    assert caught.value.hint == "Make a Client in each thread, and use it before it is closed."


def test_what_does_not_exist_is_named(client: Client) -> None:
    with pytest.raises(NotFoundError):
        client.find_run_by_id("nobody")
    with pytest.raises(NotFoundError):
        client.find_experiment("nobody")
    with pytest.raises(UsageError, match=r'tsak is not an option of a run\. Did you mean "task"'):
        client.run("demo", 1, tsak="digits_resnet")
    with pytest.raises(UsageError, match="\"repeat\" is '3', not a whole number"):
        client.run("demo", 1, command="true", repeat="3")
    for relate in (api.compare, api.judge_reproduction):
        with pytest.raises(UsageError, match="needs at least one archive on each side"):
            relate([], [])
    with pytest.raises(NotFoundError):
        api.open_archive("/nowhere")


def test_notebooks_complete_options(tmp_path: Path) -> None:
    code = (
        "import inspect, sys, types; sys.modules['IPython'] = types.ModuleType('IPython')\n"
        "from mlbench_cli.api import Client\n"
        "from mlbench_cli.runs.request import OPTIONS\n"
        "client = Client(sys.argv[1])\n"
        "assert {item.name for item in OPTIONS} < set(inspect.signature(client.run).parameters)\n"
        "print(repr(client))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "<b>")], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(f"<mlbench client of {tmp_path}/<b>: 0 runs>")


def test_importing_the_api_loads_no_heavy_library() -> None:
    code = "import sys; from mlbench_cli.api import Client; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"torch", "numpy", "pandas", "yaml", "jinja2", "typer", "rich", "kubernetes", "starlette", "matplotlib"}
    assert not heavy & {name.split(".")[0] for name in loaded}
