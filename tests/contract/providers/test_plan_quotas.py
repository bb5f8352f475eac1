"""`mlbench plan --check-quotas`: what a cloud would refuse now is not proposed."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.app import run
from mlbench_cli.predict.machines import load_machines
from tests.contract.commands.test_plan import digits_run
from tests.fakes.gke import World

Captured = pytest.CaptureFixture[str]
VCPUS = {str(machine): machine.vcpus for machine in load_machines() if machine.provider == "gke"}


def plan(folder: Path, captured: Captured, *words: str, code: int = 0) -> Any:
    near = digits_run(folder / f"run{code}{len(words)}", details={"noise_scale": {"samples": 200.0}})
    place = ("--clouds", "gke", "--region", "europe-west1", "--workers", "1,2,4,8")
    assert run(["plan", "digits_resnet", "--from", near, *place, *words, "-o", "json"]) == code
    out, err = captured.readouterr()
    return {**json.loads(out), "err": err}


def largest(items: Sequence[Any]) -> int:
    return max(int(item["workers"]) * VCPUS[item["machine"]] for item in items)


def test_machines_beyond_a_quota_are_left_out(
    gke_world: World, google: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    gke_world.quotas = {"CPUS": 40, "NVIDIA_L4_GPUS": 1, "NVIDIA_T4_GPUS": 1}
    before = plan(tmp_path, capsys, "--max-price", "1000")
    found = plan(tmp_path, capsys, "--max-price", "1000", "--check-quotas")
    assert largest(before["best"]) > 40 >= largest(found["best"])
    reasons = [item for item in found["excluded"] if "quota" in item["reason"].lower()]
    assert reasons
    assert all(item["count"] and item["hint"] for item in reasons)
    assert found["candidates"] == before["candidates"] - sum(item["count"] for item in reasons)
    assert not any(line.startswith("Create") for line in gke_world.log)


def test_a_cloud_without_credentials_is_not_asked(tmp_path: Path, capsys: Captured, world: Any) -> None:
    before = plan(tmp_path, capsys)
    found = plan(tmp_path, capsys, "--check-quotas")
    assert found["best"] == before["best"]
    assert found["err"].count("Quotas of gke were not checked") == 1
