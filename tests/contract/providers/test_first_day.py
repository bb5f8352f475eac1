"""The first day of each cloud, `mlbench doctor CLOUD --first-day`, against the doubles: without runs.

Its steps are real processes; in the one of every `make test` they are forks of a program that has the SDK loaded.

Runs need images, which need Docker: those steps are skipped, and what they would confirm is not tried. The lab's real
Kubernetes runs them in tests/e2e.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.clusters.first_day import Done, Proof, Step, _judge, _load, look_up
from tests.fakes.aws_server import AwsClient
from tests.fakes.azure_arm import World as AzureWorld
from tests.fakes.gke import World as GkeWorld
from tests.fakes.zygote import Zygote

ROOT = Path(__file__).parents[3]


def read_rows() -> set[str]:
    """The first cells of all rows of the page of assumptions."""
    page = (ROOT / "docs/clouds-assumptions.md").read_text("utf-8")
    return {line.split(" | ")[0].removeprefix("| ") for line in page.splitlines() if line.startswith("| ")}


def test_each_row_that_a_first_day_confirms_is_one_of_the_page() -> None:
    rows = read_rows()
    for cloud, document in _load().items():
        missing = [proof["row"] for proof in document["proofs"] if proof["row"] not in rows]
        assert missing == [], cloud


@pytest.fixture
def forked_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """The command lines of the steps, which are forks of one program."""
    zygote = Zygote("mlbench_cli.app", "mlbench_cli.commands.create_cluster", "google.cloud.container_v1", "yaml")
    ran: list[list[str]] = []

    def run(words: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert words[:4] == [sys.executable, "-P", "-m", "mlbench_cli"]
        assert (options["stdin"], options["check"]) == (subprocess.DEVNULL, False)
        ran.append(words[4:])
        return zygote.complete(words[4:], dict(os.environ), tmp_path / "pid")

    # Not in subprocess itself, which the double of the cluster uses in this process.
    own = SimpleNamespace(run=run, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr("mlbench_cli.clusters.first_day.subprocess", own)
    yield ran
    zygote.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_gke_from_the_price_to_nothing_left(
    command: Any, gke_world: GkeWorld, tmp_path: Path, forked_steps: list[list[str]]
) -> None:
    folder = tmp_path / "evidence"
    refused = command("doctor", "gke", "--first-day", "--to", str(tmp_path / "asked"), "--project", "demo-project")
    assert (refused.code, "There is no terminal to ask on" in refused.err) == (2, True)
    assert re.search(r"for \d\.\d\d USD/h", refused.err)
    assert gke_world.clusters == {}
    result = command("doctor", "gke", "--first-day", "--to", str(folder), "--project", "demo-project", "--yes")
    assert result.code == 0, result.err
    assert (gke_world.clusters, gke_world.repositories) == ({}, {})
    report = json.loads((folder / "first-day.json").read_text())
    assert report["left"] == []
    assert [words[0] for words in forked_steps[:3]] == ["doctor", "prices", "create-cluster"]  # nothing else was asked
    steps = {item["name"]: item["exit_code"] for item in report["steps"]}
    assert steps == {
        "doctor": 0, "prices": 0, "plan": 0, "create": 0, "push": None, "run": None, "extend": 0, "list": 0,
        "delete": 0, "gone": 0, "rest": 0,
    }  # fmt: skip
    by_step = {
        proof["row"]: item["verdict"]
        for proof, item in zip(_load()["gke"]["proofs"], report["assumptions"], strict=True)
        if proof["step"] not in ("push", "run")
    }
    assert set(by_step.values()) == {"confirmed"}, by_step
    table = (folder / "confirmed.md").read_text()
    assert "| GKE's `DEFAULT` driver is older than 580" in table
    assert "580.159.03" in table
    assert "oauth2accesstoken" not in table  # not tried: nothing was pushed
    assert "gpu: true" in (folder / "first-day.yaml").read_text()


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_rule_that_does_not_hold_is_refuted(command: Any, gke_world: GkeWorld, tmp_path: Path) -> None:
    gke_world.drivers["LATEST"] = "570.10.01"
    gke_world.policy_denied = True
    result = command("doctor", "gke", "--first-day", "--to", str(tmp_path / "day"), "--yes")
    assert result.code == 0, result.err
    rows = json.loads((tmp_path / "day" / "first-day.json").read_text())["assumptions"]
    refuted = [item["row"] for item in rows if item["verdict"] == "refuted"]
    assert any("`LATEST` is not" in row for row in refuted)
    assert "Refuted: " in result.err


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_without_quota_for_gpus_the_day_goes_on_with_cpus(command: Any, gke_world: GkeWorld, tmp_path: Path) -> None:
    gke_world.quotas["GPUS_ALL_REGIONS"] = 0
    result = command("doctor", "gke", "--first-day", "--to", str(tmp_path / "day"), "--yes")
    assert result.code == 0, result.err
    report = json.loads((tmp_path / "day" / "first-day.json").read_text())
    assert report["machine"] == ["--machine-type", "e2-standard-4"]
    assert [item["exit_code"] for item in report["steps"] if item["name"] == "plan"] == [5, 0]
    assert {item["verdict"] for item in report["assumptions"] if "driver" in item["row"]} == {"not tried"}


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_creation_that_fails_is_removed_and_its_exit_code_is_told(
    command: Any, gke_world: GkeWorld, tmp_path: Path
) -> None:
    gke_world.failing["CreateNodePool"] = "stockout"
    result = command("doctor", "gke", "--first-day", "--to", str(tmp_path / "day"), "--yes")
    assert result.code == 5, result.err
    assert (gke_world.clusters, gke_world.repositories) == ({}, {})
    rows = json.loads((tmp_path / "day" / "first-day.json").read_text())["assumptions"]
    assert "confirmed" not in {item["verdict"] for item in rows if "prices" not in item["evidence"]}


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_what_is_left_is_an_error_of_its_own(command: Any, gke_world: GkeWorld, tmp_path: Path) -> None:
    gke_world.trouble["DeleteCluster"] = "PERMISSION_DENIED-before"
    result = command("doctor", "gke", "--first-day", "--to", str(tmp_path / "day"), "--yes")
    assert result.code == 8, result.err
    assert "lists first-day-1" in result.err
    assert "mlbench delete-cluster gke first-day-1 --yes" in result.err


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_aks_from_the_price_to_nothing_left(command: Any, azure_world: AzureWorld, tmp_path: Path) -> None:
    result = command("doctor", "aks", "--first-day", "--to", str(tmp_path / "day"), "--yes")
    assert result.code == 0, result.err
    assert (azure_world.groups, azure_world.clusters) == ({}, {})
    report = json.loads((tmp_path / "day" / "first-day.json").read_text())
    tried = [
        item["verdict"]
        for proof, item in zip(_load()["aks"]["proofs"], report["assumptions"], strict=True)
        if proof["step"] not in ("push", "run")
    ]
    assert set(tried) == {"confirmed"}, report["assumptions"]


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_eks_from_the_price_to_nothing_left(command: Any, aws: AwsClient, tmp_path: Path) -> None:
    result = command("doctor", "eks", "--first-day", "--to", str(tmp_path / "day"), "--region", "eu-west-1", "--yes")
    assert result.code == 0, result.err
    report = json.loads((tmp_path / "day" / "first-day.json").read_text())
    assert report["left"] == []
    tried = [
        item["verdict"]
        for proof, item in zip(_load()["eks"]["proofs"], report["assumptions"], strict=True)
        if proof["step"] not in ("push", "run")
    ]
    assert set(tried) == {"confirmed"}, report["assumptions"]


def test_what_is_asked_wrongly_is_refused_before_anything_happens(command: Any, tmp_path: Path) -> None:
    assert command("doctor", "--first-day").code == 2
    assert command("doctor", "kind", "--first-day", "--to", str(tmp_path / "a")).code == 2
    assert command("doctor", "gke", "--to", str(tmp_path)).code == 2
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "old").touch()
    full = command("doctor", "gke", "--first-day", "--to", str(tmp_path / "full"))
    assert (full.code, "is not empty" in full.err) == (2, True)


def test_a_step_that_failed_confirms_nothing() -> None:
    create = Step("create", ("create-cluster",))
    proof = Proof("row", "create", at="cluster.state", like="ready")
    assert _judge(proof, []) == ("not tried", "the step create: was not reached")
    assert _judge(proof, [Done(create, 5)])[0] == "not tried"
    assert _judge(proof, [Done(create, 0, out='{"cluster": {"state": "ready"}}')])[0] == "confirmed"
    assert _judge(proof, [Done(create, 0, out='{"cluster": {"state": "failed"}}')])[0] == "refuted"
    assert _judge(proof, [Done(create, 0, out="no JSON")])[0] == "not tried"
    document = {"checks": [{"what": "gke rights", "state": "ok"}]}
    assert look_up(document, "checks.what=gke rights.state") == "ok"


# --- the steps, without processes -----------------------------------------------------------------------------------


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> tuple[list[list[str]], dict[str, Any]]:
    """What is run, as words of a command; and by the first word, or the name of a step, its exit code or its output."""
    ran: list[list[str]] = []
    ends: dict[str, Any] = {}

    def run(words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert words[:4] == [sys.executable, "-P", "-m", "mlbench_cli"]
        ran.append(words[4:])
        end = ends.get(words[4], 0)
        if isinstance(end, list):
            end = end.pop(0)
        if isinstance(end, Exception):
            raise end
        code, out = (end, "{}") if isinstance(end, int) else (0, end)
        return subprocess.CompletedProcess(words, code, out, "Error: the reason\nNext: try\n" if code else "")

    monkeypatch.setattr("mlbench_cli.clusters.first_day.subprocess.run", run)
    return ran, ends
