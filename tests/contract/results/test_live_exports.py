"""Trackers while a run is running, and servers of theirs: what reaches them, read back by their own programs."""

import importlib.util
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fakes.ports import reserve_port
from tests.fakes.wandb_server import WandbServer
from tests.needs import missing, needs
from tests.unit.results.runs import sealed_run

CODE = "import sys; from mlbench_cli.app import run; sys.exit(run(sys.argv[1:]))"
PATIENCE = 250
# Reports three values, and goes on when a file is there.
PROGRAM = """
import json, os, sys, time
for step in range(1, 7):
    event = {"v": 1, "event": "metric", "rank": 0, "time": time.time(), "name": "loss", "value": 1 / step, "step": step}
    print("@mlbench", json.dumps(event), flush=True)
    while step == 3 and not os.path.exists(sys.argv[1]):
        time.sleep(0.05)
"""


def need(package: str) -> None:
    """Skip a test whose processes import a package that is not here; importing it takes seconds."""
    if importlib.util.find_spec(package) is None:
        missing(f"{package} is not installed")


@pytest.fixture
def world(tmp_path: Path) -> dict[str, str]:
    """The environment of processes whose home and data folder are temporary."""
    own = {"MLBENCH_HOME": str(tmp_path / "home"), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own}


def until(condition: Callable[[], object]) -> None:
    """Wait for a condition that servers of others may need their time for."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.1)


def start(world: dict[str, str], *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CODE, *words]
    return subprocess.Popen(command, env=world, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out + err


def start_run(world: dict[str, str], folder: Path) -> Path:
    """A run that is running until the file of the result is made."""
    program, go = folder / "program.py", folder / "go"
    program.write_text(PROGRAM)
    command = f"{sys.executable} {program} {go}"
    code, text = finish(start(world, "run", "live", "1", "--command", command, "--share-machine", "--detach"))
    assert code == 0, text
    return go


def test_tensorboard_follows_a_run_to_its_end(world: dict[str, str], tmp_path: Path) -> None:
    events = needs("tensorboard.backend.event_processing.event_accumulator")
    go = start_run(world, tmp_path)
    export = start(world, "export", "tensorboard", str(tmp_path / "tb"), "live", "--follow")
    reader = events.EventAccumulator(str(tmp_path / "tb" / "live-1" / "rank-0"))

    def read() -> list[float]:
        reader.Reload()
        return [point.value for point in reader.Scalars("loss")] if "loss" in reader.Tags()["scalars"] else []

    until(lambda: (tmp_path / "tb" / "live-1" / "rank-0").exists() and len(read()) == 3)
    go.touch()
    code, text = finish(export)
    assert code == 0, text
    assert read() == pytest.approx([1 / step for step in range(1, 7)])
    assert [point.step for point in reader.Scalars("loss")] == [1, 2, 3, 4, 5, 6]


@contextmanager
def mlflow_server(folder: Path) -> Iterator[str]:
    """MLflow's own tracking server; its address."""
    held, port = reserve_port()
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "HOME": str(folder)}
    store = ["--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}", "--artifacts-destination", str(folder)]
    words = ["server", *store, "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    log = open(folder / "mlflow.log", "w")  # noqa: SIM115 - closed below
    process = subprocess.Popen([sys.executable, "-m", "mlflow", *words], env=environment, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"

    def is_up() -> bool:
        assert process.poll() is None, (folder / "mlflow.log").read_text()
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    try:
        until(is_up)
        yield address
    finally:
        process.terminate()
        process.wait(60)
        log.close()
        held.close()


@pytest.mark.nightly
@pytest.mark.slow
def test_a_server_of_mlflow_gets_a_run_while_it_runs(world: dict[str, str], tmp_path: Path) -> None:
    need("mlflow")
    with mlflow_server(tmp_path) as address:
        go = start_run(world, tmp_path)
        export = start(world, "export", "mlflow", address, "live", "--follow")

        def ask(path: str, body: object | None = None) -> object:
            data = None if body is None else json.dumps(body).encode()
            request = urllib.request.Request(f"{address}/api/2.0/mlflow/{path}", data)
            request.add_header("Content-Type", "application/json")
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)

        def runs() -> list[object]:
            found = ask("runs/search", {"experiment_ids": [str(number) for number in range(10)]})
            assert isinstance(found, dict)
            return list(found.get("runs", []))

        def values(run: object) -> list[float]:
            assert isinstance(run, dict)
            found = ask(f"metrics/get-history?run_id={run['info']['run_id']}&metric_key=loss")
            assert isinstance(found, dict)
            return [metric["value"] for metric in found.get("metrics", [])]

        until(lambda: any(len(values(run)) == 3 for run in runs()))
        go.touch()
        code, text = finish(export)
        assert code == 0, text
        (run,) = runs()
        assert isinstance(run, dict)
        assert values(run) == pytest.approx([1 / step for step in range(1, 7)])
        assert (run["info"]["run_name"], run["info"]["status"]) == ("live-1", "FINISHED")
        tags = {tag["key"]: tag["value"] for tag in run["data"]["tags"]}
        assert tags["mlbench.outcome"] == "completed"


@pytest.mark.nightly
def test_a_server_that_does_not_answer_is_named(world: dict[str, str], tmp_path: Path) -> None:
    need("mlflow")
    archive = sealed_run(tmp_path / "demo", name="demo-2")
    quick = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "5"}
    code, text = finish(start({**world, **quick}, "export", "mlflow", "http://127.0.0.1:9", str(archive)))
    assert (code, "MLflow at http://127.0.0.1:9" in text) == (10, True), text
    assert "Traceback" not in text


KEY = "local-" + "0" * 40


@pytest.mark.slow
def test_a_server_of_weights_and_biases_gets_a_run_while_it_runs(world: dict[str, str], tmp_path: Path) -> None:
    """Its own client, with its own protocol, to a server on this machine."""
    need("wandb")
    with WandbServer(KEY) as server:
        login = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY, "WANDB_ERROR_REPORTING": "false"}
        login["WANDB_X_FILE_STREAM_TRANSMIT_INTERVAL"] = "1"  # seconds between two requests; usually 15
        go = start_run(world, tmp_path)
        folder = str(tmp_path / "wandb")
        export = start({**world, **login}, "export", "wandb", folder, "live", "--follow", "--online")
        until(lambda: any(len(run.history("loss")) == 3 for run in [*server.runs.values()]))
        assert all(run.exit_code is None for run in server.runs.values())
        go.touch()
        code, text = finish(export)
        assert code == 0, text
        (run,) = server.runs.values()
    assert run.history("loss") == pytest.approx([1 / step for step in range(1, 7)])
    assert run.history("step") == [1, 2, 3, 4, 5, 6]
    assert (run.fields["displayName"], run.fields["project"], run.exit_code) == ("live-1", "mlbench", 0)
    assert json.loads(run.files["wandb-summary.json"])["outcome"] == "completed"
    # Nothing of this machine but what the archive says: no packages, no git repository, no console.
    assert run.files.keys() == {"config.yaml", "wandb-summary.json"}
    assert KEY not in text


@pytest.mark.slow
def test_a_login_that_weights_and_biases_refuses_is_named(world: dict[str, str], tmp_path: Path) -> None:
    need("wandb")
    archive = sealed_run(tmp_path / "demo", name="demo-2")
    with WandbServer(KEY) as server:
        login = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY.replace("0", "1"), "WANDB_ERROR_REPORTING": "false"}
        words = ("export", "wandb", str(tmp_path / "wandb"), str(archive), "--online")
        code, text = finish(start({**world, **login}, *words))
        assert (code, "Weights & Biases: " in text, server.runs) == (10, True, {}), text
    assert "Traceback" not in text
