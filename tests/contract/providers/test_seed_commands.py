"""The ten commands of MLBench's documentation, as they are typed there: on stand-ins of kind, and on this machine."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract import clients
from tests.fakes.kind_tools import World

TEN = (
    *("charts", "create-cluster", "delete", "delete-cluster", "download"),
    *("get-dashboard-url", "list-clusters", "run", "set-cluster", "status"),
)
Shell = Callable[..., str]


@pytest.fixture
def shell(tmp_path: Path, world: World) -> Shell:
    """Types a command line in an empty home; returns what it prints on both streams."""
    home = {"MLBENCH_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}

    def type_in(line: str, code: int = 0) -> str:
        words = shlex.split(line)
        assert words.pop(0) == "mlbench"
        done = clients.finish(*words, environment={**os.environ, **home}, cwd=tmp_path)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    return type_in


def test_the_first_page_of_help_has_the_ten_commands(shell: Shell) -> None:
    page = shell("mlbench --help")
    listed = re.findall(r"^  ([a-z-]+)  ", page.split("\n\n")[2], re.MULTILINE)
    assert sorted(listed) == list(TEN)
    assert max(len(line) for line in page.splitlines()) <= 80


def test_a_cluster_is_created_listed_chosen_and_deleted(shell: Shell) -> None:
    shell("mlbench create-cluster kind 3 my-cluster --yes")
    assert re.search(r"^my-cluster-3 \*", shell("mlbench list-clusters"), re.MULTILINE)
    shell("mlbench set-cluster local")
    assert not re.search(r"^my-cluster-3 \*", shell("mlbench list-clusters"), re.MULTILINE)
    shell("mlbench set-cluster kind my-cluster-3")
    assert re.search(r"^my-cluster-3 \*", shell("mlbench list-clusters"), re.MULTILINE)
    assert "no resources remain" in shell("mlbench delete-cluster kind my-cluster-3 --yes")
    assert "my-cluster-3" not in shell("mlbench list-clusters")
    # The clouds' names of 2020 are known, too; without their packages or credentials a plan can be shown all the same.
    assert "my-cluster-3" in shell("mlbench create-cluster gcloud 3 my-cluster --dry-run")
    assert "europe-west2-b" in shell("mlbench create-cluster gcloud -z europe-west2-b 3 my-cluster --dry-run")
    assert "my-cluster-3" in shell("mlbench create-cluster aws 3 my-cluster --dry-run")


def test_a_command_gets_its_place_and_is_stopped_before_its_end(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import sys, time; print(sys.argv[1:], flush=True); time.sleep(float(sys.argv[-1]))"
    )
    command = "sh -c 'python train.py --hosts {hosts} --rank {rank} --run_id {run_id} --backend {backend} 0'"
    shell(f'mlbench run custom-pytorch-run 2 --backend gloo --yes --command "{command}"')
    printed = shell("mlbench logs custom-pytorch-run-2 --rank 1")
    assert re.search(r"'--rank', '1', '--run_id', '\S+', '--backend', 'gloo'", printed), printed
    shell("mlbench run long 1 --yes --detach --command 'python train.py 200'")
    shell("mlbench delete long-1 --force --yes")
    assert "long-1" not in shell("mlbench status")


def test_the_dashboard_of_this_machine_is_found_while_it_runs(shell: Shell, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mlbench_cli", "serve"]
    environment = {**os.environ, "MLBENCH_HOME": str(tmp_path / "home")}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as dashboard:
        try:
            assert dashboard.stdout is not None
            url = re.search(r"http://\S+", dashboard.stdout.readline())
            assert url is not None
            assert url[0] in shell("mlbench get-dashboard-url")
        finally:
            dashboard.terminate()
