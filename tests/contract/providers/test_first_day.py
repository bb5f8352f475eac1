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

from mlbench_cli.clusters.first_day import Done, FirstDay, Proof, Step, _judge, _load, look_up
from mlbench_cli.errors import CapacityError, MlbenchError
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


@pytest.fixture(autouse=True)
def _without_docker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "no-programs"))


def verdicts(report: Any) -> dict[str, str]:
    return {item["row"].partition(" ")[0] + item["row"][-12:]: item["verdict"] for item in report["assumptions"]}


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


Commands = tuple[list[list[str]], dict[str, Any]]
PLAN = json.dumps({"plan": {"price_per_hour": 1.5}})
CREATE = ["create-cluster", "gke", "1", "first-day"]
REST = ["--project", "p", "--registry", "auto", "--ttl", "1h"]


def a_day(tmp_path: Path, cloud: str = "gke") -> FirstDay:
    return FirstDay(cloud, tmp_path / "day", ("--project", "p"))


def test_the_plan_is_a_dry_run_of_the_very_cluster_that_is_created(commands: Commands, tmp_path: Path) -> None:
    ran, ends = commands
    ends["create-cluster"] = PLAN
    told: list[str] = []
    day = a_day(tmp_path)
    assert day.plan(told.append) == {"price_per_hour": 1.5}
    words = [*CREATE, "--gpu-type", "t4", *REST]
    assert ran == [
        ["doctor", "gke", "--project", "p", "-o", "json"],
        ["prices", "update", "gke"],
        [*words, "--dry-run", "-o", "json"],
    ]
    assert told == [" ".join(["mlbench", *step]) for step in ran]
    assert list(day.steps()[0].words) == [*words, "--yes", "-o", "json"]
    assert day.has_gpu
    assert (tmp_path / "day/03-plan.out").read_text() == PLAN
    assert [item.step.name for item in day.done] == ["doctor", "prices", "plan"]


def test_without_quota_for_the_first_machine_the_next_one_is_planned(commands: Commands, tmp_path: Path) -> None:
    ran, ends = commands
    ends["create-cluster"] = [CapacityError.exit_code, PLAN]
    day = a_day(tmp_path)
    day.plan(lambda _: None)
    assert ran[-1] == [*CREATE, "--machine-type", "e2-standard-4", *REST, "--dry-run", "-o", "json"]
    assert not day.has_gpu
    assert "gpu: false" in day.write_runs_file().read_text()


@pytest.mark.parametrize(("codes", "tries"), [([1], 1), ([5, 5], 2), ([5, 2], 2)])
def test_a_plan_that_fails_creates_nothing_and_keeps_the_evidence(
    commands: Commands, tmp_path: Path, codes: list[int], tries: int
) -> None:
    """Only a lack of capacity is a reason to try another machine."""
    ran, ends = commands
    ends["create-cluster"] = list(codes)
    with pytest.raises(MlbenchError, match="nothing was created: the reason") as caught:
        a_day(tmp_path).plan(lambda _: None)
    assert len(ran) == 2 + tries
    assert "--dry-run" in (caught.value.hint or "")
    report = json.loads((tmp_path / "day/first-day.json").read_text())
    assert [item["exit_code"] for item in report["steps"]] == [0, 0, *codes]
    assert (tmp_path / "day/03-plan.err").read_text().startswith("Error: the reason")


def test_a_step_that_fails_skips_all_but_the_removal(commands: Commands, tmp_path: Path) -> None:
    ran, ends = commands
    day = a_day(tmp_path)
    (tmp_path / "day").mkdir()
    day.machine = ["--gpu-type", "t4"]
    ends["create-cluster"] = 5
    assert day.spend(lambda _: None) == 5
    assert [words[0] for words in ran] == ["create-cluster", "delete-cluster", "list-clusters", "gc"]
    skipped = {item.step.name: item.why for item in day.done if item.exit_code is None}
    assert skipped == dict.fromkeys(("push", "run", "extend", "list"), "an earlier step failed")


def test_a_removal_that_fails_outweighs_what_failed_before_it(commands: Commands, tmp_path: Path) -> None:
    ran, ends = commands
    day = a_day(tmp_path)
    (tmp_path / "day").mkdir()
    ends.update({"create-cluster": 5, "delete-cluster": 8})
    assert day.spend(lambda _: None) == 8
    assert [words[0] for words in ran][-2:] == ["list-clusters", "gc"]


def test_without_docker_only_what_needs_images_is_skipped(commands: Commands, tmp_path: Path) -> None:
    day = a_day(tmp_path)
    (tmp_path / "day").mkdir()
    assert day.spend(lambda _: None) == 0
    skipped = {item.step.name: item.why for item in day.done if item.exit_code is None}
    assert skipped == dict.fromkeys(("push", "run"), "docker is not on PATH")


def test_a_step_that_does_not_end_is_given_up(commands: Commands, tmp_path: Path) -> None:
    _, ends = commands
    ends["extend"] = subprocess.TimeoutExpired("mlbench", 1)
    day = a_day(tmp_path)
    (tmp_path / "day").mkdir()
    assert day.spend(lambda _: None) == 124
    (extended,) = (item for item in day.done if item.step.name == "extend")
    assert extended.err == "no end within 5400 s"
    assert day.done[-1].exit_code == 0


@pytest.mark.parametrize(
    ("listed", "left"),
    [
        ('{"clusters": []}', []),
        ('{"clusters": [{"name": "first-day-1", "state": "deleted"}, {"name": "other"}]}', []),
        ('{"clusters": [{"name": "first-day-1", "state": "ready"}]}', ["lists first-day-1"]),
        ("no JSON", ["unknown: "]),
        (3, ["unknown: "]),
    ],
)
def test_what_is_left_is_what_the_last_look_lists_or_cannot_tell(
    commands: Commands, tmp_path: Path, listed: str | int, left: list[str]
) -> None:
    _, ends = commands
    ends["list-clusters"] = ["{}", listed]
    day = a_day(tmp_path)
    (tmp_path / "day").mkdir()
    day.spend(lambda _: None)
    found = day.left()
    assert len(found) == len(left)
    assert all(part in text for part, text in zip(left, found, strict=True))


@pytest.mark.parametrize(
    ("created", "listed", "verdict"),
    [(0, "{}", "confirmed"), (5, "{}", "not tried"), (0, '{"clusters": [{"name": "first-day-1"}]}', "refuted")],
)
def test_that_nothing_is_left_proves_something_only_if_there_was_something(
    created: int, listed: str, verdict: str
) -> None:
    steps = [Done(Step("create", ("create-cluster",)), created), Done(Step("gone", ("list-clusters",)), 0, out=listed)]
    assert _judge(Proof("row", "gone", nameless=True), steps)[0] == verdict


def test_a_row_without_a_place_is_confirmed_by_the_step_alone() -> None:
    done = Done(Step("push", ("images", "push")), 0)
    assert _judge(Proof("row", "push"), [done]) == ("confirmed", "mlbench images push succeeded")
    skipped = Done(Step("push", ("images", "push")), None, why="docker is not on PATH")
    assert _judge(Proof("row", "push"), [done, skipped]) == ("not tried", "the step push: docker is not on PATH")


def test_a_place_must_match_as_a_whole() -> None:
    create = Done(Step("create", ("create-cluster",)), 0, out='{"driver": "570.1-beta"}')
    assert _judge(Proof("row", "create", at="driver", like=r"\d+\.\d+"), [create])[0] == "refuted"
