"""`mlbench plan` as a command: its answer, and what it refuses with what would help."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.api import Client
from mlbench_cli.api.calibrated import predictor
from mlbench_cli.app import run
from mlbench_cli.model.run import Cluster
from mlbench_cli.runs.forecast import History
from mlbench_cli.runs.request import Request
from mlbench_cli.storage.store import Store
from mlbench_cli.tasks.catalog import load_catalog
from providers.gke import api as gke
from tests.contract.commands.test_predict import CALIBRATION, calibrated_run
from tests.unit.results.runs import spec

Captured = pytest.CaptureFixture[str]


class Command:
    """`mlbench plan` in this process."""

    def __init__(self, captured: Captured) -> None:
        self._captured = captured

    def __call__(self, *words: str, code: int = 0) -> str:
        """Its standard output, or its standard error if it must fail."""
        assert run(["plan", *words]) == code
        captured = self._captured.readouterr()
        return captured.err if code else captured.out


@pytest.fixture
def plan(capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "home"))
    return Command(capsys)


def digits_run(folder: Path, batch: int = 64, samples: int = 5000, **changes: Any) -> str:
    parameters = load_catalog()["digits_resnet"].resolve("tiny", {"batch_size": batch // 2})
    kind = changes.pop("kind", None)
    place = {"cluster_kind": kind, "engine": "kubernetes", "cluster": "lab"} if kind else {}
    run_spec = spec(task="digits_resnet", preset="tiny", parameters=parameters, device="cpu", **place)
    details = {
        "global_batch": batch,
        "goals": {kind: {"samples": samples, "threshold": 80.0} for kind in ("full", "light")},
        **changes.pop("details", {}),
    }
    return str(calibrated_run(folder, run_spec=run_spec, details=details, **changes))


@pytest.mark.usefixtures("forked_ranks")
def test_the_best_for_this_machine_are_run_and_written_as_an_experiment(
    tmp_path: Path, plan: Command, capsys: Captured
) -> None:
    words = ("--clouds", "here", "--workers", "1", "--batch", "2", "--goal", "light", "--measure", "1", "-o", "json")
    document = json.loads(plan("digits_resnet", "--from", digits_run(tmp_path / "a"), *words))
    [trial] = document["measured"]
    assert trial["measured_seconds"] > 0
    assert trial["error"] == pytest.approx(trial["planned_seconds"] / trial["measured_seconds"] - 1)
    [file] = (tmp_path / "home" / "plans").glob("plan-*.yaml")
    assert run(["run", "-f", str(file), "--dry-run", "-o", "json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["runs"] == 1
    assert "best-1" in json.dumps(again)


def test_a_plan_has_bases_intervals_reasons_and_commands(tmp_path: Path, plan: Command) -> None:
    near, far = digits_run(tmp_path / "a"), digits_run(tmp_path / "b", 256, 8000)
    words = ("digits_resnet", "--from", near, "--from", far, "--workers", "1,2,4", "--batch", "1,2")
    document = json.loads(plan(*words, "--price-here", "0.05", "-o", "json"))
    assert document["samples_basis"] == "measured"
    assert document["candidates"] > 500
    assert len(document["best"]) == 3
    for item in (*document["best"], *document["pareto"]):
        assert item["low_seconds"] < item["seconds"] < item["high_seconds"]
        assert item["low_price"] < item["price"] < item["high_price"]
        assert {"speed", "samples", "price"} <= set(item["bases"])
        assert set(item["bases"].values()) <= {"measured", "published", "guessed"}
    assert sum(document["bases"].values()) == pytest.approx(1)
    for item in document["best"]:
        assert item["reasons"]
        assert any(line.startswith("mlbench run plan") for line in item["commands"])
    text = plan(*words)
    assert "Nothing is faster and cheaper than:" in text
    assert "SHARE OF UNCERTAINTY" in text


def test_commands_of_a_plan_are_ones_that_mlbench_takes(
    tmp_path: Path, plan: Command, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    near = digits_run(tmp_path / "a", details={"noise_scale": {"samples": 200.0}})
    document = json.loads(plan("digits_resnet", "--from", near, "--clouds", "here", "--workers", "1", "-o", "json"))
    (line,) = document["best"][0]["commands"]
    assert run([*line.split()[1:], "--dry-run", "--yes"]) == 0
    capsys.readouterr()
    for cloud in ("gke", "eks", "aks"):
        words = ("digits_resnet", "--from", near, "--clouds", cloud, "--workers", "2", "--batch", "1", "-o", "json")
        for item in json.loads(plan(*words))["best"]:
            create = item["commands"][0].split()
            assert create[:3] == ["mlbench", "create-cluster", cloud]
            run([*create[1:], "--dry-run"])  # without credentials it sketches the plan, or says so
            assert "No such option" not in capsys.readouterr().err, create


def test_spot_machines_have_prices_of_their_own_and_time_for_interruptions(tmp_path: Path, plan: Command) -> None:
    near = digits_run(tmp_path / "a", details={"noise_scale": {"samples": 200.0}})
    words = ("digits_resnet", "--from", near, "--clouds", "gke", "--workers", "1,2", "--batch", "1", "-o", "json")
    assert not [item for item in json.loads(plan(*words))["pareto"] if item["spot"]]
    found = [item for item in json.loads(plan(*words, "--spot"))["pareto"] if item["spot"]]
    assert found
    assert all(item["interruption_seconds"] > 0 for item in found)


def test_a_run_on_a_type_of_machine_tells_its_speed_and_network(tmp_path: Path, plan: Command) -> None:
    """The same calibration at ten times the speed on gke/n1-standard-4, over the link that its probe found."""
    noise = {"noise_scale": {"samples": 200.0}}
    near = digits_run(tmp_path / "a", details=noise)
    faster: Any = {name: [value / 10 for value in CALIBRATION[name]] for name in ("forward", "backward", "optimizer")}
    moments = ("ready_p10", "ready_p50", "ready_p90")
    faster["tensors"] = [{**row, **{name: row[name] / 10 for name in moments}} for row in CALIBRATION["tensors"]]
    far = digits_run(tmp_path / "b", details=noise, kind="gke/n1-standard-4", **faster)
    words = ("digits_resnet", "--clouds", "gke", "--region", "europe-west1", "--workers", "2", "--batch", "1")

    def find(*more: str) -> Any:
        document = json.loads(plan(*words, "--from", near, *more, "-o", "json"))
        return next(item for item in document["pareto"] if item["machine"] == "n1-standard-4")

    before, after = find(), find("--from", far)
    assert (before["bases"]["speed"], before["bases"]["network"]) == ("guessed", "published")
    assert (after["bases"]["speed"], after["bases"]["network"]) == ("measured", "measured")
    assert after["speed_note"] == "measured on gke/n1-standard-4"
    # The probed link has a delay of 5 ms one way, the documented one 50 us.
    assert after["exposed_share"] > before["exposed_share"]


def test_the_plan_is_drawn(tmp_path: Path, plan: Command) -> None:
    near = digits_run(tmp_path / "a", details={"noise_scale": {"samples": 200.0}})
    plan("digits_resnet", "--from", near, "--clouds", "gke,here", "--workers", "1,2", "--charts", str(tmp_path / "c"))
    assert (tmp_path / "c" / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("digit_resnet",), 2, 'Did you mean "digits_resnet"'),
        (("digits_resnet", "--goal", "best"), 2, "neither full nor light"),
        (("digits_resnet", "--clouds", "gce"), 2, "is not known"),
        (("digits_resnet", "--workers", "many"), 2, "--workers"),
        (("digits_resnet", "--batch", "0"), 2, "--batch"),
        (("digits_resnet", "--deadline", "soon"), 2, "is not a duration"),
        (("digits_resnet",), 4, "mlbench run cal 2 --task digits_resnet --calibrate"),
        (("digits_resnet", "--from", "RUN", "--method", "bps"), 2, "There is no method"),
        (("digits_resnet", "--from", "RUN", "--method", "dgc"), 2, "changes how many samples the goal takes"),
        (("digits_resnet", "--from", "RUN", "--deadline", "1s"), 2, "No candidate meets the deadline"),
        (
            ("digits_resnet", "--from", "RUN", "--clouds", "gke", "--max-price", "0.0001"),
            2,
            "No candidate costs at most",
        ),
        (("digits_resnet", "--from", "RUN", "--clouds", "gke", "--region", "mars"), 2, "have no known price"),
        (("mnist", "--from", "RUN"), 2, "not of mnist"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    tmp_path: Path, plan: Command, words: tuple[str, ...], code: int, message: str
) -> None:
    near = digits_run(tmp_path / "a", details={"noise_scale": {"samples": 200.0}})
    assert message in plan(*(near if word == "RUN" else word for word in words), code=code)


def test_a_run_that_missed_its_goal_is_no_basis(tmp_path: Path, plan: Command) -> None:
    near = digits_run(tmp_path / "a", details={"goals": {}})
    assert "has not reached the light goal" in plan("digits_resnet", "--from", near, "--goal", "light", code=2)


def test_old_prices_are_said(tmp_path: Path, plan: Command) -> None:
    near = digits_run(tmp_path / "a", details={"noise_scale": {"samples": 200.0}})
    words = ("digits_resnet", "--from", near, "--clouds", "gke", "--workers", "1", "-o", "json")
    assert any("mlbench prices update gke" in each for each in json.loads(plan(*words))["warnings"])


@pytest.fixture
def known(tmp_path: Path, plan: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A calibrated run of digits_resnet in the store, and no credentials of a cloud."""
    made = Path(digits_run(tmp_path / "made", details={"noise_scale": {"samples": 200.0}}))
    run_id = json.loads((made / "run.json").read_text())["id"]
    (tmp_path / "home/runs").mkdir(parents=True)
    made.rename(tmp_path / "home/runs" / run_id)
    assert run(["discover", "local"]) == 0
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere/key.json")
    for cached in (gke.client, gke.credentials, gke.token):  # another test of this process may have had some
        cached.cache_clear()


def test_a_cluster_says_what_a_task_takes_on_it(known: None, capsys: Captured) -> None:
    words = ["create-cluster", "gke", "2", "rel", "-t", "n1-standard-4", "--dry-run", "--for", "digits_resnet"]
    capsys.readouterr()
    assert run([*words, "-o", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    found, per_hour = document["estimate"], document["plan"]["price_per_hour"]
    assert found["low_seconds"] < found["seconds"] < found["high_seconds"]
    assert found["seconds"] > 480  # the cluster starts first
    assert found["price"] == pytest.approx(per_hour * found["seconds"] / 3600)
    assert run(words) == 0
    assert "for digits_resnet: about" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("-t", "n1-standard-4", "--for", "digit_resnet"), 2, 'Did you mean "digits_resnet"'),
        (("-t", "n1-standard-4", "--for", "mnist"), 4, "No calibrated run of mnist"),
        (("-t", "n2-standard-4", "--for", "digits_resnet"), 2, "speed of n2-standard-4 machines is not known"),
        (("-t", "n1-standard-4", "--zone", "asia-east1-a", "--for", "digits_resnet"), 2, "mlbench prices update gke"),
    ],
)
def test_a_cluster_for_a_task_that_cannot_be_planned_is_said(
    known: None, words: tuple[str, ...], code: int, text: str, capsys: Captured
) -> None:
    assert run(["create-cluster", "gke", "2", "rel", "--dry-run", *words]) == code
    assert text in capsys.readouterr().err


def test_limits_on_cost_know_what_the_plan_says_of_runs_that_never_ran(known: None, capsys: Captured) -> None:
    """A run on a paid cluster of which none like it has ended: its seconds are the plan's, its price the cluster's."""
    details = {"nodes": 2, "machine_type": "n1-standard-4", "plan": {"price_per_hour": 0.5}}
    store = Store()
    cluster = Cluster("rel-2", "gke", details=details, account="project", location="us-central1-a")
    run_spec = spec(task="digits_resnet", preset="tiny", cluster="rel-2")
    found = History(store, predictor(store)).estimate(run_spec, cluster)
    assert found.seconds is not None
    assert found.price == pytest.approx(found.seconds * 0.5 / 3600)
    unknown = History(store, predictor(store)).estimate(spec(task="mnist", preset="tiny"), cluster)
    assert (unknown.seconds, unknown.price) == (None, None)


def test_the_form_says_what_runs_take_together(known: None, tmp_path: Path) -> None:
    """As the dashboard asks: from runs like them, here the one in the store; of others nothing is known."""
    client = Client()
    asked = Request(name="x", workers=(2,), task="digits_resnet", preset="tiny", share_machine=True)
    found = client.plan(asked, estimate=True)
    assert found["runs"] == ["x-2"]
    assert (found["seconds"] > 0, found["price"], found["unknown"]) == (True, 0.0, 0)
    other = client.plan(Request(name="x", workers=(1,), command="true", share_machine=True), estimate=True)
    assert (other["seconds"], other["unknown"]) == (0.0, 1)
    assert "seconds" not in client.plan(asked)
