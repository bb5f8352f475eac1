"""What `mlbench predict` reads from its options, and how it shows predictions, advice and measured steps."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlbench_cli.commands import predict as module
from mlbench_cli.commands.predict import (
    _add_buckets,
    _backend,
    _cells,
    _draw,
    _fill_nodes,
    _inside,
    _measured_step,
    _methods,
    _price,
    _show,
    _show_advice,
    _show_faults,
    _sizes,
    _topology,
    _totals,
    predict,
)
from mlbench_cli.console import Format
from mlbench_cli.errors import UsageError
from mlbench_cli.model.network import parse_network
from mlbench_cli.predict.samples import Basis, SamplesToGoal
from mlbench_cli.results.analysis.goodput import Goodput
from mlbench_cli.results.figures.predictions import PredictedPair
from mlbench_cli.simulator.faults import FaultPrediction, FaultRates
from mlbench_cli.simulator.gloo import Link
from mlbench_cli.simulator.predict import Advice, Prediction, Scenario
from mlbench_cli.simulator.published import PublishedCell, PublishedComparison
from mlbench_cli.simulator.step import Step
from task_images.comm.presets import resolve

Captured = pytest.CaptureFixture[str]
BSP = resolve("bsp")
# Half as good at twice the batch: E(B) = 50 (1 + B / 64).
KNOWN = SamplesToGoal(100.0, 64, 64.0, 0.0, Basis.MEASURED, "two runs tell")
ALONE = SamplesToGoal(100.0, 64, None, 0.0, None, "one run tells")


def scenario(ranks: int = 2, **fields: Any) -> Scenario:
    return Scenario(ranks, BSP, **fields)


def prediction(ranks: int = 2, **fields: Any) -> Prediction:
    """0.2 s a step, of which a quarter is exposed communication."""
    return Prediction(scenario(ranks, **fields), Step(0.2, 0.15, 0.1, 5, 4e6, 1), 0.19, 0.25, "replay", 32)


def archive(**changes: Any) -> Any:
    spec = {
        "workers": 2,
        "processes_per_worker": 1,
        "price": {},
        "task": "digits_resnet",
        "method": None,
        **changes.pop("spec", {}),
    }
    result = {"details": {}, "updates": 400, "task_seconds": {"training": 86.0}, "timings": {}, **changes}
    return SimpleNamespace(run={"name": "demo-2", "spec": spec}, result=result)


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "topology", "sizes"),
    [
        (None, None, [2]),
        (None, (4, 8), [32]),
        ("4", (4, 8), [4]),
        ("8,4,8", None, [8, 4, 8]),
    ],
)
def test_numbers_of_workers(text: str | None, topology: tuple[int, int] | None, sizes: list[int]) -> None:
    assert _sizes(text, topology, 2) == sizes


@pytest.mark.parametrize("text", ["", "4,", "four", "1.5"])
def test_what_is_no_list_of_numbers_of_workers(text: str) -> None:
    with pytest.raises(UsageError, match="is not a list of numbers") as caught:
        _sizes(text, None, 2)
    assert caught.value.hint == "--workers 4,8,16"


@pytest.mark.parametrize(("text", "found"), [(None, None), ("8x4", (8, 4)), ("1X1", (1, 1)), ("16x1", (16, 1))])
def test_a_topology(text: str | None, found: tuple[int, int] | None) -> None:
    assert _topology(text) == found


@pytest.mark.parametrize("text", ["", "8", "8x", "x4", "0x4", "8x0", "8x4x2", "-8x4", "axb"])
def test_what_is_no_topology(text: str) -> None:
    with pytest.raises(UsageError, match="is not of the form NODESxGPUS") as caught:
        _topology(text)
    assert caught.value.hint == "--topology 8x4"


@pytest.mark.parametrize(
    ("topology", "size", "filled"),
    [(None, 7, (None, None)), ((8, 4), 32, (8, 4)), ((8, 4), 4, (1, 4)), ((2, 3), 9, (3, 3))],
)
def test_workers_fill_whole_nodes(topology: tuple[int, int] | None, size: int, filled: tuple[Any, Any]) -> None:
    assert _fill_nodes(topology, size) == filled


def test_half_a_node_names_all_workers_of_the_topology() -> None:
    with pytest.raises(UsageError, match="6 workers do not fill nodes of 4") as caught:
        _fill_nodes((2, 4), 6)
    assert caught.value.hint == "--workers 8"


def test_links_and_backends_that_are_modeled() -> None:
    assert [_inside(name) for name in ("pcie", "nvlink")] == ["pcie", "nvlink"]
    assert [_backend(name) for name in ("gloo", "nccl")] == ["gloo", "nccl"]
    with pytest.raises(UsageError, match='--inside "sxm" is neither'):
        _inside("sxm")
    with pytest.raises(UsageError, match='--backend "mpi": only gloo and nccl'):
        _backend("mpi")


def test_methods_are_compared_in_the_order_that_they_are_named() -> None:
    assert [method.name for method in _methods("fusion,bsp", archive())] == ["fusion", "bsp"]
    assert [method.name for method in _methods(None, archive())] == ["bsp"]
    assert [method.name for method in _methods(None, archive(spec={"task": "digits_ddp"}))] == ["ddp"]
    with pytest.raises(UsageError, match=r'There is no method "fushion"\..*Did you mean "fusion"') as caught:
        _methods("bsp,fushion", archive())
    assert caught.value.hint == "mlbench methods"


def test_the_messages_of_the_run_are_used_for_the_run_alone() -> None:
    calibration: Any = SimpleNamespace(ranks=2, buckets=(7, 8))
    assert _add_buckets(scenario(), calibration, archive()).buckets == (7, 8)
    for other in (
        scenario(4),
        Scenario(2, resolve("fusion")),
        scenario(network=parse_network("1gbit")),
        scenario(probed=Link(1e-3, 8e-9)),
    ):
        assert _add_buckets(other, calibration, archive()).buckets == ()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"charts": Path("x"), "runs": ["a"]}, "--charts draws predictions against measurements"),
        ({}, "No run given"),
        ({"runs": ["a", "b"]}, "A prediction uses one run"),
        ({"runs": ["a"], "network": "1gbit", "network_of": "b"}, "--network and --network-of exclude each other"),
        ({"runs": ["a", "b"], "faults": "mtbf=10m"}, "--faults takes at most one run"),
    ],
)
def test_options_that_do_not_go_together_are_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        predict(**words)


# --- what the run tells -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("price", "each"), [({}, None), ({"per_hour": None}, None), ({"per_hour": 5}, 2.5), ({"per_hour": 0.0}, 0.0)]
)
def test_the_price_of_a_worker_is_its_share_of_the_cluster(price: dict[str, Any], each: float | None) -> None:
    assert _price(archive(spec={"price": price})) == each


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({}, 86.0 / 400),
        ({"timings": {"data_wait": {"rank0": 4.0}}}, 90.0 / 400),
        ({"timings": {"data_wait": {}}}, 86.0 / 400),
        ({"updates": None}, None),
        ({"updates": 0}, None),
        ({"task_seconds": {"training": None}}, None),
        ({"details": {"throughput_protocol": {"per_update": 64, "summary": {"median": 320.0}}}}, 0.2),
    ],
)
def test_the_measured_step(changes: dict[str, Any], seconds: float | None) -> None:
    assert _measured_step(archive(**changes)) == pytest.approx(seconds)


# --- until the goal ---------------------------------------------------------------------------------------------------


def test_until_the_goal_a_larger_batch_takes_more_samples_and_less_time() -> None:
    """4 ranks of 32 samples at 50 (1 + 128 / 64) = 150 samples: 150 / 128 steps of 0.2 s, at 0.5 a worker and hour."""
    found = _totals(prediction(4), KNOWN, 0.5, 1)
    assert found is not None
    assert [found.samples, found.kept] == pytest.approx([150, 2 / 3])
    assert found.bound == ""
    assert found.seconds == pytest.approx(150 / 128 * 0.2)
    assert found.price == pytest.approx(0.5 * 4 * found.seconds / 3600)


@pytest.mark.parametrize(("ranks", "each", "workers"), [(4, 1, 4), (4, 2, 2), (5, 2, 3), (1, 8, 1)])
def test_the_price_is_that_of_whole_workers(ranks: int, each: int, workers: int) -> None:
    found = _totals(prediction(ranks), KNOWN, 3600.0, each)
    assert found is not None
    assert found.price == pytest.approx(workers * found.seconds)


@pytest.mark.parametrize(("ranks", "bound"), [(1, "at most "), (2, ""), (4, "at least ")])
def test_without_other_batch_sizes_the_samples_are_a_bound(ranks: int, bound: str) -> None:
    found = _totals(prediction(ranks), ALONE, None, 1)
    assert found is not None
    assert (found.samples, found.bound, found.price) == (100.0, bound, None)
    assert found.kept == (1.0 if ranks == 2 else None)


def test_a_run_without_a_goal_has_no_totals() -> None:
    assert _totals(prediction(), None, 1.0, 1) is None


# --- answers ----------------------------------------------------------------------------------------------------------

LINK = Link(5.15e-3, 8 / 975e6)


def document(captured: Captured, found: Prediction, needed: SamplesToGoal | None, each: float | None) -> Any:
    _show([found], archive(spec={"price": {"currency": "EUR"}}), LINK, 0.013, needed, each, Format.json)
    return json.loads(captured.readouterr().out)


def test_the_document_of_a_prediction(capsys: Captured) -> None:
    found = document(capsys, prediction(4), KNOWN, 3600.0)
    (row,) = found.pop("predictions")
    assert found == {
        "schema_version": 1,
        "run": "demo-2",
        "model_error": 0.013,
        "samples_basis": "measured",
        "samples_note": "two runs tell",
    }
    assert row == {
        "method": "bsp",
        "workers": 4,
        "network": "as measured",
        "step_seconds": 0.2,
        "low_seconds": 0.19,
        "high_seconds": 0.25,
        "efficiency": pytest.approx(0.75),
        "exposed_seconds": pytest.approx(0.05),
        "sent_bytes": 4e6,
        "messages": 5,
        "samples_per_second": pytest.approx(640),
        "basis": "replay",
        "seconds_to_goal": pytest.approx(150 / 640),
        "price_to_goal": pytest.approx(4 * 150 / 640),
        "currency": "EUR",
        "samples_to_goal": pytest.approx(150),
        "samples_kept": pytest.approx(2 / 3),
        "bound": None,
    }


def test_the_document_of_a_bound_and_of_a_run_without_a_goal(capsys: Captured) -> None:
    (row,) = document(capsys, prediction(4), ALONE, None)["predictions"]
    assert (row["bound"], row["samples_kept"], row["price_to_goal"]) == ("at least", None, None)
    found = document(capsys, prediction(4), None, 1.0)
    assert (found["samples_basis"], found["samples_note"]) == (None, None)
    (row,) = found["predictions"]
    names = ("seconds_to_goal", "price_to_goal", "samples_to_goal", "samples_kept", "bound")
    assert {row[name] for name in names} == {None}


def shown(captured: Captured, found: Prediction, needed: SamplesToGoal | None = KNOWN, link: Link = LINK) -> Any:
    _show([found], archive(), link, 0.013, needed, 3600.0, Format.text)
    return captured.readouterr()


def test_a_prediction_in_words(capsys: Captured) -> None:
    printed = shown(capsys, prediction(4))
    heads, cells = ([each.strip() for each in line.split("  ") if each.strip()] for line in printed.out.splitlines())
    assert dict(zip(heads, cells, strict=True)) == {
        "METHOD": "bsp",
        "WORKERS": "4",
        "NETWORK": "as measured",
        "STEP": "200 ms",
        "INTERVAL": "190 ms to 250 ms",
        "EFFICIENCY": "75 %",
        "EXPOSED": "50 ms",
        "SENT": "4.00 MB",
        "THROUGHPUT": "640 samples/s",
        "SAMPLES KEPT": "67 %",
        "TO GOAL": "234 ms",
        "PRICE USD": "0.94",
        "BASIS": "replay",
    }
    assert printed.err.splitlines() == [
        "Two runs tell.",
        "From demo-2: a link of 975 Mbit/s, latency one way 5.15 ms; the model is 1 % off on its own all-reduces.",
    ]


def test_a_bound_is_told_with_time_and_price() -> None:
    found = prediction(4)
    cells = _cells(found, _totals(found, ALONE, 3600.0, 1))
    assert cells[9:12] == [None, "at least 156 ms", "at least 0.62"]
    assert _cells(found, _totals(found, ALONE, None, 1))[11] is None
    assert _cells(found, None)[9:12] == [None, None, None]


@pytest.mark.parametrize(("exposed", "cell"), [(0.0, "0"), (1e-8, "0"), (2e-6, "2 us")])
def test_rounding_is_no_exposed_communication(exposed: float, cell: str) -> None:
    found = Prediction(scenario(), Step(0.2 + exposed, 0.2, 0.0, 0, 0.0, 0), 0.1, 0.3, "replay", 32)
    assert _cells(found, None)[6] == cell


def test_what_limits_a_prediction_is_told(capsys: Captured) -> None:
    spread = shown(capsys, prediction(4, spread=0.125, network=parse_network("1gbit")), None).err.splitlines()
    assert spread[0] == "The run did not reach its goal, so the number of samples to the goal is unknown."
    assert spread[1] == "Synchronous methods wait for the slowest rank; compute times vary by 12.5%."
    assert spread[2].startswith("--network assumes a shaped network that delivers its nominal rate")
    unknown = shown(capsys, prediction(), link=Link(0.0, 0.0)).err.splitlines()
    assert unknown[-1] == "From the step times of demo-2; the network is as requested."


@pytest.mark.parametrize(
    ("alpha", "words"), [(1e-6, "1 us"), (0.9e-6, "too short to resolve"), (0.0, "too short to resolve")]
)
def test_a_latency_below_the_resolution_is_none(capsys: Captured, alpha: float, words: str) -> None:
    assert f"latency one way {words}; the model" in shown(capsys, prediction(), link=Link(alpha, 8e-9)).err


def test_advice_as_table_and_document(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    found = [Advice("another method", "--method dear", 0.15, 0.33), Advice("less", "--num-cpus 2", 0.19, 0.05)]
    monkeypatch.setattr(module, "advise", lambda *_: found)
    nothing = cast(Any, None)
    _show_advice(nothing, LINK, 0.013, scenario(), Format.json)
    assert json.loads(capsys.readouterr().out) == {
        "schema_version": 1,
        "advice": [
            {"change": "another method", "options": "--method dear", "step_seconds": 0.15, "gain": 0.33},
            {"change": "less", "options": "--num-cpus 2", "step_seconds": 0.19, "gain": 0.05},
        ],
    }
    _show_advice(nothing, LINK, 0.013, scenario(), Format.text)
    assert capsys.readouterr().out.splitlines() == [
        "CHANGE          STEP    GAIN   OPTIONS",
        "another method  150 ms  +33 %  --method dear",
        "less            190 ms  +5 %   --num-cpus 2",
    ]
    found.clear()
    _show_advice(nothing, LINK, 0.126, scenario(), Format.text)
    assert capsys.readouterr().out == "No modeled change would gain more than the model's error (13 %).\n"


def test_charts_are_drawn_into_their_folder_only(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    drawn: list[Any] = []

    def draw(*words: Any) -> list[Path]:
        drawn.append(words)
        return [Path("a.svg"), Path("a.png")]

    monkeypatch.setattr(module, "draw_predictions", draw)
    pairs = [PredictedPair("runs", "bsp", 1.0, 1.1)]
    _draw(pairs, "seconds of a step", None)
    assert drawn == []
    _draw(pairs, "seconds of a step", Path("out"))
    assert drawn == [(pairs, "seconds of a step", Path("out"))]
    assert capsys.readouterr().err == "Written: a.svg\nWritten: a.png\n"


def test_shares_under_faults_as_table_and_document(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    asked: list[FaultRates] = []

    def predict_faults(rates: FaultRates) -> list[FaultPrediction]:
        asked.append(rates)
        return [
            FaultPrediction(10.0, False, 0.7, 0.71, 0.65, 0.75),
            FaultPrediction(20.0, True, 0.755, 0.76, 0.7, 0.81),
        ]

    monkeypatch.setattr(module, "predict_faults", predict_faults)
    words = "mtbf=100s,checkpoint=2s,restart=5s,interval=50s"
    _show_faults(words, [], False, Format.json)
    assert json.loads(capsys.readouterr().out) == {
        "schema_version": 1,
        "rates": {"mtbf": 100.0, "checkpoint": 2.0, "restart": 5.0, "interval": 50.0},
        "predictions": [
            {"interval": 10.0, "is_best": False, "formula": 0.7, "replayed": 0.71, "low": 0.65, "high": 0.75},
            {"interval": 20.0, "is_best": True, "formula": 0.755, "replayed": 0.76, "low": 0.7, "high": 0.81},
        ],
        "measured": None,
        "measured_after_startup": None,
    }
    _show_faults(words, [], False, Format.text)
    lines = [
        [each.strip() for each in line.split("  ") if each.strip()] for line in capsys.readouterr().out.splitlines()
    ]
    assert lines == [
        ["CHECKPOINT EVERY", "E[ETTR]", "REPLAYED", "95 % OF REPLAYS"],
        ["10.0 s", "70 %", "71 %", "65 % to 75 %"],
        ["20.0 s (best)", "76 %", "76 %", "70 % to 81 %"],
    ]
    assert asked == [FaultRates(100.0, 2.0, 5.0, 50.0)] * 2


@pytest.mark.parametrize(
    ("interval", "recoveries", "rates", "words"),
    [
        (
            10.0,
            [(0.2, 3.5, 0.5), (0.4, 3.5, 0.3)],
            FaultRates(30.0, 0.1, 4.2, 10.0),
            "; the replay predicts 71 % at its interval.",
        ),
        (15.0, [(1.0, 2.0, 3.0)], FaultRates(30.0, 0.1, 6.0, 15.0), "."),
    ],
)  # fmt: skip
def test_a_run_tells_its_rates_and_what_it_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured, interval: float, recoveries: Any, rates: FaultRates, words: str
) -> None:
    costs = [dict(zip(("detection", "restart", "loading"), each, strict=True)) for each in recoveries]
    opened = archive(faults={"checkpoint_seconds": 0.1, "recoveries": costs})
    parts = {"startup": 4.0, "useful": 79.2}
    goodput = Goodput("demo-2", False, 0.7, 103.0, parts, 1, 1, None, None, interval, None, None)
    asked: list[FaultRates] = []

    def predict_faults(rates: FaultRates) -> list[FaultPrediction]:
        asked.append(rates)
        return [FaultPrediction(10.0, True, 0.7, 0.71, 0.65, 0.75)]

    monkeypatch.setattr(module, "open_run", lambda *_: nullcontext(opened))
    monkeypatch.setattr(module, "measure_goodput", lambda _: goodput)
    monkeypatch.setattr(module, "predict_faults", predict_faults)
    monkeypatch.setattr(module, "Store", lambda **_: None)
    _show_faults("mtbf=30s", ["demo-2"], False, Format.text)
    assert capsys.readouterr().err == (f"demo-2 measured 80 % in the 99.0 s after start-up, with 1 restart{words}\n")
    assert [*vars(asked[0]).values()] == pytest.approx([*vars(rates).values()])


def test_a_run_without_checkpoints_tells_no_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = archive(faults={"checkpoint_seconds": None, "recoveries": []})
    goodput = Goodput("demo-2", False, 0.7, 103.0, {}, 1, 1, None, None, None, None, None)
    monkeypatch.setattr(module, "open_run", lambda *_: nullcontext(opened))
    monkeypatch.setattr(module, "measure_goodput", lambda _: goodput)
    monkeypatch.setattr(module, "Store", lambda **_: None)
    with pytest.raises(UsageError, match="--faults says no checkpoint and no restart"):
        _show_faults("mtbf=30s", ["demo-2"], False, Format.text)


def test_checked_runs_have_their_errors_and_pairs(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """A step of 0.2 s was predicted; one run measured 0.16 s and the other nothing."""
    opened = {"a": archive(updates=500, task_seconds={"training": 80.0}), "b": archive(updates=None)}
    drawn: list[Any] = []
    calibration = SimpleNamespace(ranks=2, buckets=())
    monkeypatch.setattr(module, "Store", lambda **_: None)
    monkeypatch.setattr(module, "open_run", lambda store, name, unproven: nullcontext(opened[name]))
    monkeypatch.setattr(module, "read_calibration", lambda *_, required: (calibration, LINK, 0.013))
    monkeypatch.setattr(module, "predict_step", lambda *_: prediction())
    monkeypatch.setattr(module, "_draw", lambda *words: drawn.append(words))
    predict(["a", "b"], check=True, charts=Path("out"), output=Format.json)
    row = {"run": "demo-2", "workers": 2, "method": "bsp", "predicted_seconds": 0.2, "collectives_error": 0.013}
    assert json.loads(capsys.readouterr().out) == {
        "schema_version": 1,
        "runs": [
            {**row, "measured_seconds": 0.16, "error": pytest.approx(0.25)},
            {**row, "measured_seconds": None, "error": None},
        ],
    }
    assert drawn == [([PredictedPair("runs", "bsp", 0.16, 0.2)], "seconds of a step", Path("out"))]
    predict(["a", "b"], check=True)
    lines = [
        [each.strip() for each in line.split("  ") if each.strip()] for line in capsys.readouterr().out.splitlines()
    ]
    assert lines == [
        ["RUN", "WORKERS", "METHOD", "MEASURED", "PREDICTED", "ERROR", "COLLECTIVES"],
        ["demo-2", "2", "bsp", "160 ms", "200 ms", "+25.0 %", "1.3 %"],
        ["demo-2", "2", "bsp", "-", "200 ms", "-", "1.3 %"],
    ]


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `predict` opens, simulates and shows, of a calibrated run with two ranks."""
    seen: dict[str, Any] = {"scenarios": [], "opened": []}
    calibration = SimpleNamespace(ranks=2, buckets=(7,))

    def open_run(store: Any, name: str, unproven: bool) -> Any:
        seen["opened"].append((name, unproven))
        goal = {"kind": "full", "threshold": 80.0}
        task = "other" if name == "other" else "digits_resnet"
        result = {
            "outcome": "goal_missed" if name == "missed" else "goal_reached", "goal": goal, "details": {},
            "samples": 1000 if name == "a" else 2000, "world_size": 2, "updates": 1, "timings": {},
        }  # fmt: skip
        size = 32 if name == "a" else 64
        spec = {
            "workers": 2, "processes_per_worker": 1, "price": {"per_hour": 3.0}, "task": task,
            "parameters": {"batch_size": size}, "method": {},
        }  # fmt: skip
        return nullcontext(SimpleNamespace(run={"name": name, "spec": spec}, result=result))

    def read_calibration(opened: Any, *, required: bool) -> Any:
        seen["required"] = required
        return calibration, LINK, 0.013

    def predict_step(calibration: Any, link: Link, error: float, found: Scenario) -> str:
        seen["scenarios"].append(found)
        return f"prediction {len(seen['scenarios'])}"

    def show(found: Any, archive: Any, link: Link, error: float, needed: Any, price: Any, output: Format) -> None:
        seen.update(shown=found, needed=needed, price=price, output=output)

    monkeypatch.setattr(module, "Store", lambda **_: None)
    monkeypatch.setattr(module, "open_run", open_run)
    monkeypatch.setattr(module, "read_calibration", read_calibration)
    monkeypatch.setattr(module, "read_run_probe", lambda store, name, unproven: Link(1e-3, 1e-9))
    monkeypatch.setattr(module, "predict_step", predict_step)
    monkeypatch.setattr(module, "_show", show)
    return seen


def test_a_plain_prediction_is_of_the_run_itself(asked: dict[str, Any]) -> None:
    predict(["a"])
    assert asked["scenarios"] == [Scenario(2, BSP, buckets=(7,))]
    assert (asked["opened"], asked["required"]) == ([("a", False)], True)
    assert (asked["shown"], asked["output"]) == (["prediction 1"], Format.text)
    assert asked["price"] == 1.5  # of a worker
    assert (asked["needed"].at, asked["needed"].known) == (64, pytest.approx(1000))


def test_each_size_is_predicted_with_each_method(asked: dict[str, Any]) -> None:
    predict(
        ["a"], "4,8", "1gbit,5ms", method="fusion,dear", topology="2x4", inside="nvlink", oversubscription=2.0,
        backend="nccl", servers=3, stragglers="10%", price=0.25, unproven=True, output=Format.json,
    )  # fmt: skip
    expected = [
        Scenario(
            *(size, resolve(name), parse_network("1gbit,5ms"), nodes, 4, "nvlink", 2.0, 3, "nccl", 0.1)
        )
        for size, nodes in ((4, 1), (8, 2))
        for name in ("fusion", "dear")
    ]  # fmt: skip
    assert asked["scenarios"] == expected
    assert (asked["opened"], asked["required"]) == ([("a", True)], False)
    assert (asked["price"], asked["output"]) == (0.25, Format.json)


def test_the_network_of_another_run_is_its_probed_link(asked: dict[str, Any]) -> None:
    predict(["a"], network_of="b", price=0.0)
    (found,) = asked["scenarios"]
    assert (found.probed, found.network, found.buckets) == (Link(1e-3, 1e-9), None, ())
    assert (asked["required"], asked["price"]) == (False, 0.0)


def test_samples_to_the_goal_come_from_runs_that_reached_it(asked: dict[str, Any]) -> None:
    """1,000 samples at batch 64 and 2,000 at 128: the same number of updates, and so proportional to the batch."""
    predict(["a"], more=["b"])
    assert asked["needed"].samples(128) == pytest.approx(2000, rel=0.01)
    assert [name for name, _ in asked["opened"]] == ["a", "b"]
    predict(["missed"])
    assert asked["needed"] is None
    with pytest.raises(UsageError, match="missed"):
        predict(["missed"], more=["b"])
    with pytest.raises(UsageError, match="missed"):
        predict(["a"], more=["missed"])
    with pytest.raises(UsageError, match='The run "other" is of other, not of digits_resnet'):
        predict(["a"], more=["other"])


def test_advice_is_about_the_first_scenario(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    advised: list[Any] = []
    monkeypatch.setattr(module, "_show_advice", lambda *words: advised.append(words[2:]))
    predict(["a"], "4,8", advice=True)
    assert advised == [(0.013, Scenario(4, BSP), Format.text)]
    assert asked["scenarios"] == []


def test_published_tables_are_checked_without_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Any] = []
    monkeypatch.setattr(module, "_check_published", lambda output, charts: checked.append((output, charts)))
    predict(check=True)
    predict(["published"], check=True, charts=Path("out"), output=Format.json)
    assert checked == [(Format.text, None), (Format.json, Path("out"))]


def test_published_tables_are_summarized_by_method(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """Cells that the model's constants are from are neither drawn nor counted."""

    def cell(method: str, rate: float, predicted: float, is_calibration: bool = False) -> PublishedComparison:
        return PublishedComparison(PublishedCell("m", 32, "net", method, 8, rate), predicted, is_calibration)

    found = [
        cell("BSP-A2A", 100.0, 100.0, True), cell("BSP-A2A", 100.0, 110.0), cell("BSP-A2A", 100.0, 80.0),
        cell("WFBP-A2A", 50.0, 60.0),
    ]  # fmt: skip
    drawn: list[Any] = []
    monkeypatch.setattr(module, "compare_published", lambda watch: found)
    monkeypatch.setattr(module, "_draw", lambda *words: drawn.append(words))
    predict(check=True, charts=Path("out"))
    printed = capsys.readouterr()
    assert [line.split() for line in printed.out.splitlines()] == [
        ["METHOD", "CELLS", "MEAN", "ERROR", "WORST", "CLAIM"],
        ["BSP-A2A", "2", "15.0", "%", "20.0", "%", "yes"],
        ["WFBP-A2A", "1", "20.0", "%", "20.0", "%", "no"],
    ]
    assert printed.err.startswith("The fastest of the all-reduce methods is the predicted one in 1 of 1 settings, and ")
    pairs = [
        PredictedPair("net", "BSP-A2A", 100.0, 110.0), PredictedPair("net", "BSP-A2A", 100.0, 80.0),
        PredictedPair("net", "WFBP-A2A", 50.0, 60.0),
    ]  # fmt: skip
    assert drawn == [(pairs, "samples per second", Path("out"))]
    predict(check=True, output=Format.json)
    document = json.loads(capsys.readouterr().out)
    assert document["cells"][3] == {
        "model": "m", "network": "net", "method": "WFBP-A2A", "gpus": 8, "measured": 50.0, "predicted": 60.0,
        "error": pytest.approx(0.2), "is_calibration": False,
    }  # fmt: skip
    assert [each["is_calibration"] for each in document["cells"]] == [True, False, False, False]
    assert set(document["order"]) == {"all", "all_reduce"}
