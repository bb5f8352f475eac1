"""The commands of the pages about Slurm and hosts, on the machines of this test: attach, plan, run, follow, delete."""

from pathlib import Path

import pytest

from tests.documentation import ROOT, run_page
from tests.e2e.machines.fleet import Client, Fleet

pytestmark = pytest.mark.timeout(900)  # each page has half a dozen trainings


def shrink(command: str) -> str:
    """The same run with the smallest preset, without a question."""
    if not command.startswith("mlbench run"):
        return command
    return command.replace(" --task ", " --yes --preset tiny --task ")


def test_documented_commands_run_on_hosts(hosts: Client, fleet: Fleet, tmp_path: Path) -> None:
    """In the pages the hosts are m1, m2 and m3, and their names need no configuration of ssh."""

    def adapt(command: str) -> str | None:
        if command.startswith("mlbench attach-hosts"):
            return None if "hosts.txt" in command else "mlbench " + " ".join(hosts.attach)
        return shrink(command.replace("m3", fleet.hosts[2]))

    ran = run_page(ROOT / "docs/how-to/machines.md", tmp_path, needs="hosts", adapt=adapt)
    assert len(ran) >= 7, ran
    assert {hosts.result(name)["outcome"] for name in ("demo-1", "demo-2")} == {"completed"}
    assert {hosts.result(name)["outcome"] for name in ("ps-2", "both-lab-1")} == {"goal_reached"}


def test_documented_commands_run_on_slurm(slurm: Client, tmp_path: Path) -> None:
    """In the page the partition has GPUs, and more nodes than are here."""

    def adapt(command: str) -> str | None:
        if command.startswith("mlbench attach-slurm"):
            return None if "--login" in command else "mlbench " + " ".join(slurm.attach)
        command = command.replace("2 4 8", "1 2").replace(" --gpu --gpus-per-worker 8", "")
        return shrink(command.replace("cifar10_resnet20_ddp", "allreduce"))

    ran = run_page(ROOT / "docs/how-to/machines.md", tmp_path, needs="slurm", adapt=adapt)
    assert len(ran) >= 5, ran
    assert {slurm.result(name)["outcome"] for name in ("demo-1", "demo-2")} == {"completed"}
