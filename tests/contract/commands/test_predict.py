"""`mlbench predict` as a command: what it says of a calibrated run, and what it refuses."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.app import run
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.results.archive.documents import write_run_document
from mlbench_cli.results.archive.seal import seal
from mlbench_cli.util.json_text import format_document
from task_images.comm.presets import resolve
from tests.unit.results.runs import START, event, new_run, observation_of, spec, training_log

Captured = pytest.CaptureFixture[str]
CALIBRATION: dict[str, Any] = {
    "schema_version": 1,
    "ranks": 2,
    "backend": "gloo",
    "framework": "torch 2.15.0",
    "threads": 1,
    "cores": 2.0,
    "load_before": 0.1,
    "batch": 32,
    "tensors": [
        {
            "name": f"layer{n}",
            "bytes": 400_000,
            "ready_p10": 0.04 + 0.01 * n,
            "ready_p50": 0.05 + 0.01 * n,
            "ready_p90": 0.06 + 0.01 * n,
        }
        for n in range(5)
    ],
    "forward": [0.03, 0.04, 0.05],
    "backward": [0.08, 0.09, 0.1],
    "optimizer": [0.001, 0.002, 0.003],
    "step": [0.081, 0.092, 0.103],
    "collectives": [
        {"operation": "all_reduce", "bytes": 65_536, "samples": 9, "p10": 0.0215, "p50": 0.0219, "p90": 0.0224},
        {"operation": "all_reduce", "bytes": 4 << 20, "samples": 9, "p10": 0.054, "p50": 0.0555, "p90": 0.058},
    ],
}


def calibrated_run(
    folder: Path, probed: bool = True, run_spec: RunSpec | None = None, details: Any = None, **changes: Any
) -> Path:
    links = [{"from": n, "to": 1 - n, "rtt_p50_seconds": 0.0103, "together_bits_per_second": 0.975e9} for n in (0, 1)]
    probe: Mapping[str, Any] = {
        "stage": "before",
        "form": "full",
        "ranks": 2,
        "networks": 2 if probed else 1,
        "links": links,
        "counters": [],
    }
    reported = {} if details is None else {"details": details}
    logs = {0: [event("network", **probe), *training_log(0, **reported)], 1: training_log(1)}
    made = new_run(folder, run_spec or spec(), logs)
    output = folder / "output" / "rank-0"
    output.mkdir(parents=True)
    (output / "calibration.json").write_text(json.dumps({**CALIBRATION, **changes}))
    write_run_document(made)
    seal(made, observation_of())
    return folder


class Command:
    """`mlbench predict` in this process."""

    def __init__(self, captured: Captured) -> None:
        self._captured = captured

    def __call__(self, *words: str, code: int = 0) -> str:
        """Its standard output, or its standard error if it must fail."""
        assert run(["predict", *words]) == code
        text = self._captured.readouterr()
        return text.out if code == 0 else text.err


@pytest.fixture
def predict(capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "home"))
    return Command(capsys)


def test_predictions_have_an_interval_and_a_basis(tmp_path: Path, predict: Command) -> None:
    folder = str(calibrated_run(tmp_path / "a"))
    document = json.loads(predict(folder, "--workers", "2,4,8", "--method", "bsp,optfusion,noop", "-o", "json"))
    rows = document["predictions"]
    assert [(row["workers"], row["method"]) for row in rows][:4] == [
        (2, "bsp"),
        (2, "optfusion"),
        (2, "noop"),
        (4, "bsp"),
    ]
    assert all(row["low_seconds"] < row["step_seconds"] < row["high_seconds"] for row in rows)
    assert [row["basis"] for row in rows] == ["replay"] * 3 + ["predicted"] * 6
    assert rows[2]["step_seconds"] == pytest.approx(0.092)
    assert rows[0]["step_seconds"] > rows[1]["step_seconds"] > rows[2]["step_seconds"]
    assert document["model_error"] < 0.02  # of all-reduces that were measured over 1 Gbit/s and 5 ms


def test_a_thousand_ranks_need_a_network(tmp_path: Path, predict: Command) -> None:
    folder = str(calibrated_run(tmp_path / "a"))
    assert "more than 4 times the 2" in predict(folder, "--workers", "1024", code=2)
    words = ("--workers", "1024,10000", "--network", "100gbit,10us", "-o", "json")
    rows = json.loads(predict(folder, *words))["predictions"]
    assert [row["basis"] for row in rows] == ["extrapolated"] * 2


def test_a_link_is_fitted_where_ranks_share_one_stack(tmp_path: Path, predict: Command) -> None:
    folder = str(calibrated_run(tmp_path / "a", probed=False))
    document = json.loads(predict(folder, "-o", "json"))
    assert document["model_error"] < 0.01


def test_advice_is_sorted_by_its_gain(tmp_path: Path, predict: Command) -> None:
    document = json.loads(predict(str(calibrated_run(tmp_path / "a")), "--advise", "-o", "json"))
    gains = [item["gain"] for item in document["advice"]]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 0.01
    assert "a network of 9.8gbit,5.2ms" in [item["change"] for item in document["advice"]]


def test_a_topology_alone_says_how_many_workers(tmp_path: Path, predict: Command) -> None:
    """It is of 32 ranks; those of its nodes that the run itself would need were predicted."""
    words = ("--topology", "4x8", "--network", "100gbit,10us", "-o", "json")
    (row,) = json.loads(predict(str(calibrated_run(tmp_path / "a")), *words))["predictions"]
    assert row["workers"] == 32


def test_gloo_has_a_flat_ring_whatever_the_nodes(tmp_path: Path, predict: Command) -> None:
    """Nobody's gloo reduces inside nodes first: 8 ranks on 2 nodes take what 8 ranks on 8 nodes take."""
    folder = str(calibrated_run(tmp_path / "a"))
    seconds = [
        json.loads(predict(folder, "--network", "1gbit,1ms", "--workers", "8", *words, "-o", "json"))["predictions"][0]
        for words in ((), ("--topology", "2x4"))
    ]
    assert seconds[0]["step_seconds"] == seconds[1]["step_seconds"]


def test_another_network_is_shaped_or_was_probed(tmp_path: Path, predict: Command, capsys: Captured) -> None:
    folder, other = str(calibrated_run(tmp_path / "a")), str(calibrated_run(tmp_path / "b"))
    (row,) = json.loads(predict(folder, "--network-of", other, "-o", "json"))["predictions"]
    (own,) = json.loads(predict(folder, "-o", "json"))["predictions"]
    assert row["network"] == "975 Mbit/s,5.15 ms (probed)"
    assert row["step_seconds"] == own["step_seconds"]
    assert (row["basis"], own["basis"]) == ("predicted", "replay")
    assert "exclude each other" in predict(folder, "--network-of", other, "--network", "1gbit", code=2)
    unprobed = str(calibrated_run(tmp_path / "c", probed=False))
    assert "did not probe a network" in predict(folder, "--network-of", unprobed, code=4)
    assert run(["predict", folder, "--network", "1gbit,5ms"]) == 0
    assert "delivers its nominal rate" in capsys.readouterr().err


def test_steps_elsewhere_are_rather_longer_than_predicted(tmp_path: Path, predict: Command) -> None:
    """By more than they are shorter: the model's errors on other networks have one sign."""
    folder = str(calibrated_run(tmp_path / "a"))
    (row,) = json.loads(predict(folder, "--network", "100mbit,5ms", "-o", "json"))["predictions"]
    step = row["step_seconds"]
    assert row["high_seconds"] - step > 1.5 * (step - row["low_seconds"])


def test_a_run_is_held_against_its_own_measurement(tmp_path: Path, predict: Command) -> None:
    (row,) = json.loads(predict("--check", str(calibrated_run(tmp_path / "a")), "-o", "json"))["runs"]
    assert row["measured_seconds"] == pytest.approx((86.0 + 4.0) / 400)  # its steps, and waiting for data
    assert row["error"] == pytest.approx(row["predicted_seconds"] / row["measured_seconds"] - 1)


def test_what_a_run_knows_of_its_own_steps_is_in_their_replay(tmp_path: Path, predict: Command) -> None:
    """Loading batches, what messages cost the computation beside them, and how large its own messages were."""

    def replay(name: str, **changes: Any) -> float:
        folder = calibrated_run(tmp_path / name, run_spec=spec(method=resolve("wfbp").to_dict()), **changes)
        return float(json.loads(predict(str(folder), "-o", "json"))["predictions"][0]["step_seconds"])

    plain = replay("plain")
    assert replay("data", data=[0.001, 0.002, 0.003]) == pytest.approx(plain + 0.002)
    assert replay("overlap", overlap={"alone": 0.1, "beside": 0.12, "communicated": 0.1}) > plain
    assert replay("buckets", buckets=[2_000_000]) > plain  # one message at the end instead of five
    whole = str(tmp_path / "buckets")
    assert json.loads(predict(whole, "--workers", "2,4", "-o", "json"))["predictions"][1]["messages"] == 5


def test_timed_blocks_are_the_measured_step(tmp_path: Path, predict: Command) -> None:
    """Without the first steps, and by the median block: of 8 samples in 0.2 s each, or 0.4 s of a disturbed one."""
    protocol = {"per_update": 64, "summary": {"median": 320.0}}
    folder = calibrated_run(tmp_path / "a", details={"throughput_protocol": protocol})
    (row,) = json.loads(predict("--check", str(folder), "-o", "json"))["runs"]
    assert row["measured_seconds"] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("changes", "words", "message"),
    [
        ({"threads": 2}, (), "its times mostly reflect the scheduler"),
        ({"ranks": 1, "collectives": []}, (), "neither collectives nor a network|has no network"),
        ({"tensors": [{"name": "x"}]}, (), "is not a calibration"),
        ({"schema_version": 9}, (), "this mlbench reads 1"),
        ({}, ("--workers", "many"), "is not a list of numbers"),
        ({}, ("--workers", "0"), "a prediction is for 1 to 10000"),
        ({}, ("--method", "mgwfpb"), 'Did you mean "mgwfbp"'),
        ({}, ("--method", "fsdp2"), "fsdp2 is not simulated"),
        ({}, ("--network", "1gbps"), "is not a number with a unit"),
        ({}, ("--topology", "four"), "not of the form NODESxGPUS"),
        ({}, ("--workers", "4", "--topology", "2x3"), "4 workers do not fill nodes of 3"),
        ({}, ("--backend", "mpi"), "only gloo and nccl are modeled"),
        ({}, ("--backend", "nccl"), "NCCL on another topology needs its network"),
    ],
)
def test_what_carries_no_prediction_is_refused(
    tmp_path: Path, predict: Command, changes: Mapping[str, Any], words: tuple[str, ...], message: str
) -> None:
    probed = "ranks" not in changes
    assert re.search(message, predict(str(calibrated_run(tmp_path / "a", probed, **changes)), *words, code=2))


def test_a_run_without_a_calibration_says_how_to_get_one(tmp_path: Path, predict: Command) -> None:
    folder = calibrated_run(tmp_path / "a")
    plain = new_run(tmp_path / "b", spec())
    write_run_document(plain)
    seal(plain, observation_of())
    assert folder.exists()
    assert "mlbench run NAME 2 --task TASK --calibrate" in predict(str(tmp_path / "b"), code=4)


def test_the_replay_of_faults_is_held_against_the_run(tmp_path: Path, predict: Command, capsys: Captured) -> None:
    """Trains from 4 s to 30 s, is killed, and trains from 34 s to 103 s; the checkpoint that counts is of 20 s."""
    faulted = spec(faults="at 26s kill rank 1", on_failure="restart", checkpoint_every="10s")
    marks = [
        event("metric", at=at, name="checkpoint_seconds", value=0.1, step=10 * at)
        for at in (10, 20, *range(40, 100, 10))
    ]
    loaded = event("metric", at=33.5, name="restore_seconds", value=0.5, step=200)
    run_of = new_run(tmp_path / "a", faulted, {0: [*training_log(0)[:3], *marks, loaded, *training_log(0)[3:]]})
    planned = {"at": 26.0, "kind": "kill", "target": 1}
    attempts = [
        {"started": 0.0, "training": 4.0, "ended": 30.2, "ranks": 2, "rank": 1, "why": "killed"},
        {"started": 32.0, "training": 34.0, "ended": 103.0, "ranks": 2, "rank": None, "resumed_update": 200},
    ]
    record: dict[str, Any] = {"seed": faulted.seed, "script": faulted.faults, "policy": "restart", "began": START}
    events = [{"planned": planned, "at": 30.0, "rank": 1, "problem": None, "until": None}]
    record.update(ended=103.0, attempts=attempts, events=events)
    (tmp_path / "a/faults.json").write_bytes(format_document(record))
    write_run_document(run_of)
    seal(run_of, observation_of())
    document = json.loads(predict(str(tmp_path / "a"), "--unproven", "--faults", "mtbf=30s", "-o", "json"))
    useful = (20 - 4) + (103 - 34) - 8 * 0.1
    assert document["measured_after_startup"] == pytest.approx(useful / (103 - 4), abs=1e-3)
    assert document["rates"]["restart"] == pytest.approx(0.2 + 3.5 + 0.5, abs=0.3)
    assert run(["predict", str(tmp_path / "a"), "--unproven", "--faults", "mtbf=30s"]) == 0
    assert "in the 99.0 s after start-up, with 1 restart; the replay predicts" in capsys.readouterr().err


def test_stragglers_slow_those_that_wait_and_a_price_follows_the_time(tmp_path: Path, predict: Command) -> None:
    words = (str(calibrated_run(tmp_path / "a")), "--workers", "8", "--method", "bsp,async-ps", "-o", "json")
    plain, slower = (json.loads(predict(*words, *more))["predictions"] for more in ((), ("--stragglers", "measured")))
    assert slower[0]["step_seconds"] > plain[0]["step_seconds"]
    assert slower[1]["step_seconds"] == plain[1]["step_seconds"]
    assert plain[0]["price_to_goal"] is None
    (row, _) = json.loads(predict(*words, "--price", "2.5"))["predictions"]
    assert row["price_to_goal"] == pytest.approx(2.5 * 8 * row["seconds_to_goal"] / 3600)


def test_a_price_is_that_of_machines_and_not_of_ranks(tmp_path: Path, predict: Command) -> None:
    price = {"per_hour": 5.0, "currency": "USD", "source": "list"}
    two_ranks = spec("demo-1", 1, processes_per_worker=2, price=price)
    folder = str(calibrated_run(tmp_path / "a", probed=False, run_spec=two_ranks))
    rows = json.loads(predict(folder, "--workers", "2,4,7", "-o", "json"))["predictions"]
    for row, machines in zip(rows, (1, 2, 4), strict=True):
        assert row["price_to_goal"] == pytest.approx(5.0 * machines * row["seconds_to_goal"] / 3600)


def test_the_check_is_drawn(tmp_path: Path, predict: Command) -> None:
    predict("--check", "--charts", str(tmp_path / "charts"))
    assert (tmp_path / "charts/predictions.png").read_bytes().startswith(b"\x89PNG")
    predict("--check", str(calibrated_run(tmp_path / "a")), "--charts", str(tmp_path / "runs"))
    assert (tmp_path / "runs/predictions.svg").exists()
    assert "--check" in predict(str(tmp_path / "a"), "--charts", str(tmp_path / "no"), code=2)


def test_the_published_table_is_predicted(predict: Command) -> None:
    cells = json.loads(predict("--check", "-o", "json"))["cells"]
    errors = [abs(cell["error"]) for cell in cells if cell["method"] == "BSP-A2A" and not cell["is_calibration"]]
    assert len(cells) == 189
    assert sum(errors) / len(errors) <= 0.10


def test_a_larger_batch_needs_more_samples_as_other_runs_tell(tmp_path: Path, predict: Command) -> None:
    """100 samples at batch 64, 200 at 256: E_min is 66.7 and B_crit 128, so that 128 samples a step take 133."""
    details = [
        {"global_batch": batch, "goals": {"full": {"samples": count}}} for batch, count in ((64, 100), (256, 200))
    ]
    near, far = (str(calibrated_run(tmp_path / str(n), details=item)) for n, item in enumerate(details))
    document = json.loads(predict(near, "--from", far, "--workers", "2,4", "-o", "json"))
    assert document["samples_basis"] == "measured"
    own, other = document["predictions"]
    assert (own["samples_kept"], own["bound"]) == (1, None)
    assert other["samples_to_goal"] == pytest.approx(400 / 3)
    assert other["samples_kept"] == pytest.approx(0.75)
    assert other["seconds_to_goal"] == pytest.approx(400 / 3 / 128 * other["step_seconds"])
    alone = json.loads(predict(near, "--workers", "4", "-o", "json"))["predictions"][0]
    assert (alone["bound"], alone["samples_kept"], alone["samples_to_goal"]) == ("at least", None, pytest.approx(100))
    noisy = {**details[0], "noise_scale": {"samples": 128.0}}
    guessed = json.loads(predict(str(calibrated_run(tmp_path / "c", details=noisy)), "--workers", "4", "-o", "json"))
    assert guessed["samples_basis"] == "guessed"
    assert guessed["predictions"][0]["samples_kept"] == pytest.approx(0.75)
