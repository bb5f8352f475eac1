"""The whole story on a real cluster, as a user tells it: run, look, download, verify, draw, delete."""

import json
import subprocess
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.e2e.conftest import Mlbench

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]


def test_two_workers_on_two_nodes_reach_the_goal(mlbench: Mlbench, tmp_path: Path) -> None:
    mlbench("run", "digits", "2", "--task", "digits_resnet", "--preset", "tiny", "--backend", "gloo", "--yes")

    status = mlbench.json("status", "digits-2")
    assert status["outcome"] == "goal_reached"
    assert len({rank["node"] for rank in status["ranks"]}) == 2
    assert "epoch 1" in mlbench("logs", "digits-2", "--rank", "0")
    mlbench("wait", "digits-2")

    archive = tmp_path / "digits.zip"
    mlbench("download", "digits-2", "--output", str(archive))
    mlbench("verify", str(archive))
    names = zipfile.ZipFile(archive).namelist()
    assert {"result.json", "logs/rank-0.log", "logs/rank-1.log"} <= set(names)
    assert any(name.startswith("manifests/") for name in names)
    folder = unpack(archive, tmp_path / "all")
    subprocess.run(["sha256sum", "--quiet", "-c", "SHA256SUMS"], cwd=folder, check=True)
    # KIND: all of it works, and nothing of it is a figure.
    assert json.loads((folder / "result.json").read_text())["label"]["word"] == "functional"
    assert "not a performance measurement" in (folder / "official_result.txt").read_text()
    assert "not a performance measurement" in mlbench("status", "digits-2")
    mlbench("charts", str(tmp_path / "charts"), str(archive), "--yes")
    assert (tmp_path / "charts" / "total_time.png").stat().st_size > 10_000
    mlbench("delete", "digits-2", "--yes")
    mlbench("status", "digits-2", exit_code=4)


def test_a_parameter_server_runs_in_the_pod_of_a_worker(mlbench: Mlbench, tmp_path: Path) -> None:
    words = [
        "--task",
        "digits_resnet",
        "--preset",
        "tiny",
        "--method",
        "wfbp-ps",
        "--set",
        "run.servers=1",
        "--set",
        "run.spread=no",
    ]
    mlbench("run", "served", "2", *words, "--memory", "1Gi", "--yes")
    status = mlbench.json("status", "served-2")
    assert status["outcome"] == "goal_reached"
    assert [rank["rank"] for rank in status["ranks"]] == [0, 1, 2]
    assert "its self-check passed" in mlbench("logs", "served-2", "--rank", "0")
    assert "all 2 trainers are done" in mlbench("logs", "served-2", "--rank", "2")
    mlbench("download", "served-2", "--output", str(tmp_path / "served.zip"))
    (job,) = yaml.safe_load_all(zipfile.ZipFile(tmp_path / "served.zip").read("manifests/job.yaml"))
    assert job["spec"]["completions"] == 2
    mlbench("delete", "served-2", "--yes")


def test_all_reduce_detached_then_waited_for(mlbench: Mlbench, tmp_path: Path) -> None:
    mlbench("run", "reduce", "2", "--task", "allreduce", "--preset", "tiny", "--detach", "--yes")
    mlbench("wait", "reduce-2", "--timeout", "5m")
    assert mlbench.json("status", "reduce-2")["outcome"] == "completed"
    archive = tmp_path / "reduce.zip"
    mlbench("download", "reduce-2", "--output", str(archive))
    mlbench("verify", str(archive))
    names = zipfile.ZipFile(archive).namelist()
    assert any(name.startswith("output/rank-0/") for name in names)
    mlbench("delete", "reduce-2", "--yes")


def test_a_dying_rank_fails_the_run(mlbench: Mlbench) -> None:
    command = "sh -c 'echo here; [ {rank} = 1 ] && exit 3; sleep 60'"
    image = f"localhost/mlbench/allreduce:{_version()}"
    mlbench("run", "dies", "2", "--command", command, "--image", image, "--backend", "gloo", "--set",
            "run.run_on_all=yes", "--yes", exit_code=7)  # fmt: skip
    status = mlbench.json("status", "dies-2")
    assert status["outcome"] == "failed"
    assert status["first_failed"] == 1
    mlbench("delete", "dies-2", "--yes", "--force")


def _version() -> str:
    import mlbench_cli

    return mlbench_cli.__version__


def unpack(archive: Path, folder: Path) -> Path:
    with zipfile.ZipFile(archive) as file:
        file.extractall(folder)
    return folder
