"""The table of an experiment: baselines, efficiency, exposed communication, failures, and what others published."""

import csv
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.results.analysis.figures import COST, SECONDS, THROUGHPUT, Figure
from mlbench_cli.results.analysis.published import load_survey, parse_table, read_logs, select_series
from mlbench_cli.results.analysis.series import Measurement, Row, make_rows, measure
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.results.figures.experiment import (
    draw_experiment,
    list_offers,
    to_csv,
    to_document,
    to_markdown,
)

MORE = {"run": "s", COST: "USD"}
Run = tuple[dict[str, str], Measurement]


@pytest.fixture
def run(measured: Measurement) -> Callable[..., Run]:
    """Makes a run with a method, workers, and its rate in images/s, if it did not fail, and other figures."""

    def make(method: str, workers: int, rate: float | None = None, name: str = "", task: str = "t", **more: Any) -> Run:
        name = name or f"{method}-{workers}"
        figures = {} if rate is None else {THROUGHPUT: Figure(rate, "images/s", True)}
        figures |= {figure: Figure(value, MORE.get(figure, "s")) for figure, value in more.items()}
        one = replace(measured, name=name, workers=workers, figures=figures, moment=measured.moment._replace(run=name))
        return {"task": task, "method": method}, one if figures else replace(one, outcome="failed", summary="it broke")

    return make


def rows_of(*runs: Run) -> dict[str, Row]:
    return {row.settings["method"]: row for row in make_rows(runs)}


def test_speed_up_and_efficiency_need_a_baseline_of_the_same_experiment(run: Callable[..., Run]) -> None:
    rows = rows_of(run("ddp", 2, 190.0))
    assert rows["ddp"].speedup(2) is None
    assert rows["ddp"].efficiency(2) is None
    rows = rows_of(run("ddp", 1, 100.0), run("ddp", 2, 190.0))
    assert rows["ddp"].efficiency(2) == pytest.approx(0.95)


def test_a_method_without_its_own_baseline_takes_that_of_the_same_settings(run: Callable[..., Run]) -> None:
    rows = rows_of(run("single", 1, 100.0), run("ddp", 2, 180.0))
    assert rows["ddp"].efficiency(2) == pytest.approx(0.9)
    rows = rows_of(run("single", 1, 100.0), run("ddp", 2, 180.0, task="other"))
    assert rows["ddp"].speedup(2) is None


def test_runs_are_the_unit_of_the_interval(run: Callable[..., Run]) -> None:
    for rates, low in (((10.0,), None), ((9.0, 10.0, 11.0), 7.6)):
        [row] = make_rows(run("a", 1, rate, name=f"r{rate:g}") for rate in rates)
        value = row.value(1)
        assert value is not None
        assert value.count == len(rates)
        assert value.mean == pytest.approx(math.prod(rates) ** (1 / len(rates)))
        assert value.low == (None if low is None else pytest.approx(low, abs=0.2))


def test_the_method_that_sends_nothing_shows_what_communication_is_exposed(run: Callable[..., Run]) -> None:
    rows = rows_of(run("noop", 2, 200.0), run("ddp", 2, 150.0), run("ddp", 1, 100.0))
    assert rows["ddp"].exposed == {2: pytest.approx(0.25)}
    assert rows["noop"].exposed == {}
    assert "exposed 2" in to_markdown("x", list(rows.values()))


def test_failures_stay_in_the_table_with_their_reason(run: Callable[..., Run]) -> None:
    text = to_markdown("Title", make_rows([run("a", 1, 10.0), run("a", 2)]))
    assert "| failed |" in text
    assert "- a-2: it broke" in text


def test_csv_has_what_was_set_before_what_was_found(run: Callable[..., Run]) -> None:
    rows = make_rows([run("a", 1, 10.0), run("a", 2, 15.0, **{SECONDS: 3.0, COST: 0.5})])
    [first, second] = csv.DictReader(io.StringIO(to_csv(rows)))
    assert list(first)[:4] == ["task", "method", "published", "workers"]
    assert float(second["efficiency"]) == pytest.approx(0.75)
    assert (second["seconds"], second["price"]) == ("3.0", "0.5")
    assert to_document(rows)[0]["cells"][1]["efficiency"] == pytest.approx(0.75)


def read(path: Path, metric: str | None = None, **result: Any) -> Row:
    """The row of one run."""
    archive = Archive.open(path)
    archive.result.update(result)  # type: ignore[typeddict-item]
    [row] = make_rows([({"task": "t"}, replace(measure(archive), workers=1))], metric)
    return row


def test_a_run_is_valued_by_a_figure_its_throughput_or_its_seconds(sealed: Path) -> None:
    protocol = {"throughput_protocol": {"rates": [1.0, 3.0], "unit": "tokens"}}
    cases: list[tuple[dict[str, Any], str | None, float, str]] = [
        ({}, "val_Prec@1 best", 80.5, "val_Prec@1 best"),
        ({"details": protocol}, None, 2.0, "tokens/s"),
        ({}, None, 51200 / 90, "samples/s"),
        ({"samples": None}, None, 100.0, "seconds"),
        ({"details": protocol}, "seconds", 100.0, "seconds"),
        ({}, "goal", 80.5, "Prec@1"),
    ]
    for changes, metric, value, unit in cases:
        row = read(sealed, metric, **changes)
        found = row.value(1)
        assert found is not None
        assert found.mean == pytest.approx(value)
        assert row.unit == unit
    failed = read(sealed, outcome="failed", summary="it broke")
    assert (failed.value(1), failed.problems(1)) == (None, ["run-2: it broke"])
    assert read(sealed, "x").problems(1) == ["run-2: it did not report x"]
    missed = read(sealed, "seconds", outcome="goal_missed", summary="it missed its goal")
    assert missed.problems(1) == ["run-2: it missed its goal"]


def test_what_was_sent_stands_beside_what_was_reached(sealed: Path, tmp_path: Path) -> None:
    """Accuracy is no rate: it has no speedup, and its figure is against bytes."""
    archive = Archive.open(sealed)
    archive.result["details"] = {"communication": {"bytes": 4e7, "wire_bytes": 5e6}}
    one = measure(archive)
    rows = make_rows(
        [
            ({"task": "t", "method": name}, replace(one, workers=workers))
            for name in ("bsp", "diloco")
            for workers in (1, 2)
        ],
        "goal",
    )
    table = to_markdown("Title", rows).splitlines()
    assert table[2] == "| task | method | unit | 1 worker | 2 workers | MB sent 2 |"
    assert table[4] == "| t | bsp | Prec@1 | 80.5 | 80.5 | 5.00 |"
    assert [row["sent_bytes"] for row in csv.DictReader(io.StringIO(to_csv(rows)))] == ["5000000.0"] * 4
    names = sorted(path.name for path in draw_experiment("Title", rows, tmp_path))
    assert names == [f"{name}.{suffix}" for name in ("pareto", "throughput") for suffix in ("csv", "png", "svg")]


def test_less_is_better_for_seconds(run: Callable[..., Run]) -> None:
    rows = make_rows([run("a", 1, **{SECONDS: 10.0}), run("a", 2, **{SECONDS: 5.0})])
    assert rows[0].unit == "seconds"
    assert rows[0].efficiency(2) == pytest.approx(1.0)


def test_offers_cost_money_or_the_time_of_workers(run: Callable[..., Run]) -> None:
    rows = make_rows([run("a", 1, 100.0), run("a", 4, 200.0), run("b", 4, 300.0)])
    offers, unit = list_offers(rows)
    assert unit == "seconds of workers"
    assert [(offer.label, offer.cost) for offer in offers] == [("t, a", 10.0), ("t, a", 20.0), ("t, b", 40 / 3)]
    priced = make_rows([run("a", 1, 100.0, **{"run": 10.0, COST: 1.0})])
    assert list_offers(priced)[1] == "price"
    assert list_offers(priced)[0][0].cost == pytest.approx(1.0)


# --- what others published ------------------------------------------------------------------------------------------


def test_the_published_table_has_252_rates_in_63_series() -> None:
    series = load_survey()
    assert len(series) == 63
    assert sum(rate.workers > 1 for one in series for rate in one.rates) == 252
    [one] = select_series(["survey-2020/ResNet-50/10GbE/MG-WFBP"])
    assert [(rate.workers, rate.rate) for rate in one.rates] == [
        *((1, 253.1), (4, 1003.18), (8, 1980.58), (16, 3784.98), (32, 6883.6)),
    ]
    [row] = make_rows([], published=[one])
    assert row.efficiency(32) == pytest.approx(6883.6 / 32 / 253.1)
    assert "± 12.7" in to_markdown("x", [row])


@pytest.mark.parametrize(("text", "known"), [("survey-2021", "survey-2020"), ("survey-2020/AlexNet", "ResNet-50")])
def test_an_unknown_table_says_which_there_are(text: str, known: str) -> None:
    with pytest.raises(UsageError) as caught:
        select_series([text])
    assert known in str(caught.value.hint)


def test_logs_of_the_seed_are_read_with_mean_and_deviation(tmp_path: Path) -> None:
    name = "rdma-0-method-mgwfbp-dnn-bert_base-bs-64-nworker-4-compressor-none-thres-0.log"
    lines = ["Iter #0: 1.0 sentences/sec per GPU", "Total sen/sec on 4 GPU(s): 600.0 +-1.5"]
    (tmp_path / name).write_text("\n".join([*lines, "NCCL INFO noise", "Total sen/sec on 4 GPU(s): 620.0 +-1.5"]))
    [series] = read_logs(tmp_path)
    assert (series.model, series.network, series.method, series.batch_size) == ("BERT-Base", "10GbE", "MG-WFBP", 64)
    assert series.unit == "sentences"
    assert [(rate.workers, rate.rate, rate.deviation) for rate in series.rates] == [(4, 610.0, 10.0)]
    (tmp_path / name).write_text("nothing")
    with pytest.raises(NotFoundError, match="has no rates"):
        read_logs(tmp_path)


@pytest.mark.parametrize(("model", "unit"), [("ResNet-50", "images"), ("BERT-Large", "sentences")])
def test_a_markdown_table_of_the_seed_is_read(model: str, unit: str) -> None:
    text = (
        "|  DNN | BS | CONNECTION | METHOD | 1 GPU | 4 GPUs |\n|---|---|---|---|---|---|\n"
        f"| {model} | 64 | 10GbE with TCP/IP | WFBP-A2A | 253.1 | 1015.400 +- 1.26 | \n"
    )
    [series] = parse_table(text, "mine")
    assert (series.model, series.unit) == (model, unit)
    assert [(rate.workers, rate.rate, rate.deviation) for rate in series.rates] == [(1, 253.1, None), (4, 1015.4, 1.26)]


@pytest.mark.parametrize(("switch", "network"), [("0", "10GbE"), ("1", "100GbIB"), ("2", "100GbE"), ("3", "")])
def test_the_switch_of_a_log_names_its_network(tmp_path: Path, switch: str, network: str) -> None:
    name = f"rdma-{switch}-method-own-dnn-resnet50-bs-32-nworker-4-x.log"
    (tmp_path / name).write_text("Total img/sec on 4 GPU(s): 925.0 +-1")
    [series] = read_logs(tmp_path)
    assert (series.network, series.model, series.method) == (network, "ResNet-50", "own")
