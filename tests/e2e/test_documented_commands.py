"""The commands of the pages about KIND, on the cluster that the other tests here have: their run, its files, its link.

What would make or delete a cluster is planned only, since the other tests do that, and images are loaded already.
"""

from pathlib import Path

import pytest

import mlbench_cli
from tests.documentation import ROOT, run_page
from tests.e2e.conftest import CLUSTER, Mlbench

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]


def adapt(command: str) -> str | None:
    """A documented command for CLUSTER, with the smallest training."""
    command = command.partition("  #")[0].replace("test-3", CLUSTER).replace("4.0.0", mlbench_cli.__version__)
    if command.startswith("mlbench create-cluster"):
        return command if "--dry-run" in command else command.replace(" --yes", " --dry-run")
    if command.startswith(("make ", "docker ", "mlbench delete-cluster", "mlbench gc", "mlbench images push")):
        return None
    if command.startswith("mlbench run") and "--preset" not in command:
        command = command.replace("--task digits_resnet", "--task digits_resnet --preset tiny")
    if command.startswith("mlbench run") and "--create" in command:
        return f"{command} --dry-run"
    if command.startswith("mlbench run") and "--dry-run" not in command:
        return f"{command} --yes"
    return command


@pytest.mark.parametrize(("page", "count"), [("tutorial/cluster.md", 10), ("how-to/local.md", 6)])
def test_documented_commands_run_on_kind(mlbench: Mlbench, page: str, count: int, tmp_path: Path) -> None:
    (tmp_path / "home").symlink_to(mlbench.home)
    ran = run_page(ROOT / "docs" / page, tmp_path, needs="docker", adapt=adapt)
    assert len(ran) >= count, ran
    for name in ("my-run-1", "my-run-2", "slow-2"):
        if any(command.startswith(f"mlbench run {name.rpartition('-')[0]} ") for command in ran):
            mlbench("delete", name, "--yes")
