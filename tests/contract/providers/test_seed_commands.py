"""The ten commands of MLBench's documentation, as they are typed there: on stand-ins of kind, and on this machine."""

import os
import re
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract import clients
from tests.fakes.helm_tool import HelmTool
from tests.fakes.kind_tools import World

CHART = Path(__file__).parents[3] / "charts" / "mlbench"
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


def test_the_dashboards_own_image_is_a_custom_value_of_its_chart(shell: Shell, world: World) -> None:
    HelmTool(world.bin)
    image = "--custom-value master.image.repository=user/mlbench_master --custom-value master.image.tag=testing"
    create = f"mlbench create-cluster gcloud 3 my-cluster {image} --dry-run"
    assert "--custom-value needs a Helm chart" in shell(create, code=2)
    printed = shell(f"{create} --chart-location {CHART}")
    assert "repository: user/mlbench_master" in printed
    assert "tag: testing" in printed


def test_runs_of_several_sizes_are_looked_at_downloaded_drawn_and_deleted(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "from mlbench import emit\n"
        "emit('metric', name='val_global_loss', value=0.25, epoch=1)\n"
        "emit('metric', name='val_global_Prec@1', value=95.0, epoch=1)\n"
    )
    printed = shell("mlbench run my-run 2 4 --task digits_resnet --light --command 'python train.py' --yes")
    assert "Started my-run-2" in printed
    assert "Started my-run-4" in printed
    status = shell("mlbench status my-run-2")
    assert re.search(r"^val_global_loss +0.250 ", status, re.MULTILINE), status
    assert re.search(r"^val_global_Prec@1 +95", status, re.MULTILINE), status
    shell("mlbench download my-run-2")
    with zipfile.ZipFile(tmp_path / "results.zip") as results:
        assert results.read("official_result.txt").startswith(b"90% Top 1 Validation Accuracy reached in ")
    shell("mlbench charts figures")
    for name in ("total_time", "speedup", "time_for_all_phases"):
        assert (tmp_path / "figures" / f"{name}.png").exists()
    shell("mlbench delete my-run-2 --yes")
    assert "my-run-2" not in shell("mlbench status")


@pytest.mark.slow
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
