"""The table of an experiment as whole documents: Markdown, CSV and JSON, and how runs become cells."""

from typing import Any

import pytest

from mlbench_cli.model.run import JsonObject
from mlbench_cli.results.analysis.experiment_table import (
    Offer,
    Row,
    Sample,
    list_offers,
    make_rows,
    name_settings,
    read_sample,
    setting_names,
    to_csv,
    to_document,
    to_markdown,
    worker_counts,
)
from mlbench_cli.results.analysis.rates import PublishedSeries, Rate


def sample(method: str, workers: int, value: float | None, run: str = "", **more: Any) -> Sample:
    settings = more.pop("settings", {"task": "t", "method": method})
    return Sample(run or f"{method}-{workers}", settings, workers, value, more.pop("unit", "images/s"), **more)


PUBLISHED = PublishedSeries(
    "paper", "ResNet", 64, "10GbE", "BSP", "images", (Rate(1, 200.0, None), Rate(2, 300.0, 4.5))
)
SAMPLES = [
    sample("noop", 2, 400.0),
    sample("ddp", 1, 150.0, seconds=10.0, price=1.0),
    sample("ddp", 2, 240.0, "a", seconds=6.0, price=1.2, sent=3e6),
    sample("ddp", 2, 360.0, "b", seconds=4.0, price=0.8, sent=1e6),
    sample("ddp", 2, None, "c", seconds=2.0, price=0.4, problem="rank 1 | died", sent=9e6),
]
# Two values have the interval of Student's distribution with one degree of freedom: t(0.975, 1) = 12.706.
LOW, HIGH = 300 - 12.706204736 * 60, 300 + 12.706204736 * 60


def test_the_whole_table_in_markdown() -> None:
    text = to_markdown("Title", make_rows(SAMPLES, [PUBLISHED])).replace("\u00a0", " ")
    assert text.splitlines() == [
        "# Title",
        "",
        "| task | method | network | source | unit | 1 worker | 2 workers | speed-up 2 | efficiency 2 | exposed 2 "
        "| MB sent 2 |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        "| t | noop |  |  | images/s |  | 400 | 2.67× | 133 % |  |  |",
        "| t | ddp |  |  | images/s | 150 | 300 (240 to 360 range) | 2.00× | 100 % | 25 % | 2.00 |",
        "| ResNet | BSP | 10GbE | paper | images/s | 200 | 300 ± 4.50 | 1.50× | 75 % |  |  |",
        "",
        "Means of runs, with the 95 % interval (Student's t) in parentheses, or the range of two runs. One run has "
        "neither: its timed blocks are not repeats. Published rates: mean ± standard deviation of the source; other "
        "machines, other software. exposed: share of the time beyond that of the method `noop`, which sends nothing. "
        "MB sent: by rank 0, as its method counts them.",
        "",
        "Failed:",
        "",
        "- c: rank 1 | died",
    ]
    assert text.endswith("died\n")


def test_columns_that_no_row_fills_are_not_in_the_table() -> None:
    text = to_markdown("T", make_rows([sample("a|b", 2, 5.0), sample("c", 4, None, problem="x")]))
    lines = text.splitlines()
    assert lines[2:6] == [
        "| task | method | unit | 2 workers | 4 workers |",
        "|---|---|---|---|---|",
        "| t | a/b | images/s | 5.00 |  |",
        "| t | c |  |  | failed |",
    ]
    assert "Published" not in text
    assert "MB sent" not in text
    assert "exposed" not in text


def test_the_whole_table_as_a_document() -> None:
    noop, ddp, published = to_document(make_rows(SAMPLES, [PUBLISHED]))
    empty: dict[str, Any] = {
        **dict.fromkeys(("deviation", "speedup", "efficiency", "exposed_share", "seconds", "price", "sent_bytes")),
        "problems": [],
    }
    single = {"low": None, "high": None, "confidence": 0.95}
    assert noop == {
        "settings": {"task": "t", "method": "noop"},
        "published": None,
        "unit": "images/s",
        "cells": [
            {
                **empty,
                "workers": 2,
                "value": {"count": 1, "mean": 400.0, **single},
                "speedup": {"count": 1, "mean": pytest.approx(400 / 150), **single},
                "efficiency": pytest.approx(200 / 150),
                "runs": ["noop-2"],
            }
        ],
    }
    assert ddp["cells"] == [
        {
            **empty,
            "workers": 1,
            "value": {"count": 1, "mean": 150.0, **single},
            "seconds": 10.0,
            "price": 1.0,
            "runs": ["ddp-1"],
        },
        {
            "workers": 2,
            "value": {
                "count": 2,
                "mean": 300.0,
                "low": pytest.approx(LOW),
                "high": pytest.approx(HIGH),
                "confidence": 0.95,
            },
            "deviation": None,
            "speedup": {"count": 1, "mean": 2.0, **single},
            "efficiency": 1.0,
            "exposed_share": 0.25,
            "seconds": 4.0,
            "price": pytest.approx(0.8),
            "sent_bytes": 2e6,
            "runs": ["a", "b", "c"],
            "problems": ["c: rank 1 | died"],
        },
    ]
    assert (published["published"], published["unit"]) == ("paper", "images/s")
    assert published["settings"] == {"task": "ResNet", "network": "10GbE", "method": "BSP", "source": "paper"}
    assert [(cell["workers"], cell["deviation"], cell["runs"]) for cell in published["cells"]] == [
        *((1, None, []), (2, 4.5, [])),
    ]


def test_the_whole_table_in_csv() -> None:
    lines = to_csv(make_rows([*SAMPLES[:2], sample("ddp", 2, 300.0, "=a"), SAMPLES[4]], [PUBLISHED])).splitlines()
    assert lines == [
        "task,method,network,source,published,workers,value,low,high,deviation,unit,speedup,efficiency,exposed,"
        "seconds,price,sent_bytes,runs,failed",
        f"t,noop,,,,2,400.0,,,,images/s,{400 / 150},{400 / 150 / 2},,,,,noop-2,0",
        "t,ddp,,,,1,150.0,,,,images/s,,,,10.0,1.0,,ddp-1,0",
        "t,ddp,,,,2,300.0,,,,images/s,2.0,1.0,0.25,2.0,0.4,,'=a c,1",
        "ResNet,BSP,10GbE,paper,paper,1,200.0,,,,images/s,,,,,,,,0",
        "ResNet,BSP,10GbE,paper,paper,2,300.0,,,4.5,images/s,1.5,0.75,,,,,,0",
    ]


@pytest.mark.parametrize(
    ("unit", "values", "speedup"),
    [
        ("images/s", (100.0, 150.0), 1.5),
        ("samples_per_second", (100.0, 150.0), 1.5),
        ("seconds", (100.0, 40.0), 2.5),
        ("Prec@1", (90.0, 91.0), None),
    ],
)
def test_what_a_speed_up_is_depends_on_the_unit(unit: str, values: tuple[float, float], speedup: float | None) -> None:
    [row] = make_rows([sample("a", number, value, unit=unit) for number, value in zip((1, 2), values, strict=True)])
    found = row.speedup(2)
    assert (found.mean if found else None) == speedup
    assert row.efficiency(2) == (None if speedup is None else speedup / 2)
    assert (row.speedup(1), row.speedup(3), row.efficiency(1)) == (None, None, None)


def test_a_baseline_is_first_the_rows_own_and_then_one_of_the_same_settings() -> None:
    rows = make_rows([sample("x", 1, 50.0), sample("a", 1, 100.0), sample("a", 2, 150.0), sample("b", 2, 100.0)])
    assert [row.baseline.mean if row.baseline else None for row in rows] == [50.0, 100.0, 50.0]
    failed = make_rows([sample("a", 1, None, problem="x"), sample("a", 2, 150.0), sample("b", 1, 75.0)])
    assert failed[0].speedup(2) is not None
    assert failed[0].efficiency(2) == 1.0


def test_time_is_exposed_only_beside_the_silent_method_at_the_same_size() -> None:
    rows = make_rows(
        [sample("noop", 1, 100.0), sample("noop", 2, 200.0), sample("noop", 8, None, problem="x")]
        + [sample("ddp", size, 90.0) for size in (1, 2, 4, 8)]
    )
    assert rows[1].exposed == {2: pytest.approx(0.55)}
    seconds = make_rows([sample(name, 2, 4.0, unit="seconds") for name in ("noop", "ddp")])
    assert seconds[1].exposed == {}


def test_labels_sizes_and_settings_are_in_the_order_of_appearance() -> None:
    rows = make_rows(
        [
            sample("a", 4, 1.0, settings={"task": "t", "network": ""}),
            sample("b", 2, 1.0, settings={"task": "u", "method": "m"}),
            sample("c", 4, 1.0, settings={}),
        ]
    )
    assert [row.label for row in rows] == ["t", "u, m", "run"]
    assert worker_counts(rows) == [2, 4]
    assert setting_names(rows) == ["task", "network", "method"]


@pytest.mark.parametrize(
    ("runs", "named"),
    [
        ([("t", {}), ("u", {})], [{"task": "t"}, {"task": "u"}]),
        (
            [("t", {"runs": "one", "seed": "1", "set.batch": "8"}), ("u", {"runs": "two", "backend": "mpi"})],
            [{"task": "t", "batch": "8"}, {"task": "u", "backend": "mpi"}],
        ),
        (
            [("t", {"runs": "one", "cluster": "c"}), ("t", {"runs": "two"}), ("u", {})],
            [
                {"task": "t", "series": "one", "cluster": "c"},
                {"task": "t", "series": "two"},
                {"task": "u", "series": ""},
            ],
        ),
    ],
)
def test_rows_are_named_by_what_sets_them_apart(
    runs: list[tuple[str, dict[str, str]]], named: list[dict[str, str]]
) -> None:
    found = name_settings(runs)
    assert found == named
    assert [list(each) for each in found] == [list(each) for each in named]


RESULT: JsonObject = {"outcome": "completed", "wall_seconds": 9.0, "task_seconds": {"wall": 7.0}, "details": {}}


def test_a_sample_has_the_runs_time_price_and_bytes() -> None:
    result = {
        **RESULT,
        "price": {"amount": 1.5, "currency": "EUR"},
        "details": {"communication": {"wire_bytes": 10, "bytes": 99}},
    }
    assert read_sample("r", {"a": "b"}, 4, result, None) == Sample(
        "r", {"a": "b"}, 4, 7.0, "seconds", 9.0, 1.5, "EUR", None, 10.0
    )


@pytest.mark.parametrize(
    ("details", "sent"),
    [
        ({"communication": {"bytes": 99}}, 99.0),
        ({"communication": {"wire_bytes": "many"}}, None),
        ({"communication": "none"}, None),
        ({}, None),
        (None, None),
    ],
)
def test_bytes_that_a_method_did_not_count_are_unknown(details: Any, sent: float | None) -> None:
    assert read_sample("r", {}, 1, {**RESULT, "details": details}, None).sent == sent


@pytest.mark.parametrize(
    ("change", "metric", "value", "problem"),
    [
        ({"outcome": "goal_reached"}, None, 7.0, None),
        ({"outcome": "goal_missed"}, None, 7.0, None),
        ({"outcome": "budget_spent"}, None, 7.0, None),
        ({"outcome": "stopped", "summary": "stopped by hand"}, None, None, "stopped by hand"),
        ({"outcome": "failed", "summary": "died"}, "seconds", None, "died"),
        ({"task_seconds": None}, None, 9.0, None),
        ({"task_seconds": {"wall": None}}, "seconds", 9.0, None),
        ({"task_seconds": None, "wall_seconds": None}, None, None, "it did not report a time"),
        ({"goal": {"reached": True, "last": 3.0, "metric": "m"}}, "seconds", 7.0, None),
        ({"goal": {"reached": False}, "summary": "missed"}, "seconds", None, "missed"),
        ({"goal": {"reached": False, "last": 3.0, "metric": "m"}}, "goal", 3.0, None),
        ({"goal": {"reached": True, "last": None, "metric": "m"}}, "goal", None, "it did not report goal"),
        ({}, "goal", None, "it did not report goal"),
        ({"metrics": {"loss": 0.5}}, "loss", 0.5, None),
        ({"metrics": {"loss": "nan"}}, "loss", None, "it did not report loss"),
        ({"details": {"throughput": {"samples_per_second": 5}}}, None, 5.0, None),
        ({"details": {"throughput": {"samples_per_second": "fast"}}}, None, 7.0, None),
        ({"details": {"throughput": 5}}, None, 7.0, None),
        ({"details": {"throughput_protocol": {"rates": [2.0, 4.0]}}}, None, 3.0, None),
        ({"details": {"throughput_protocol": {"rates": [2.0, "x"]}}}, None, 7.0, None),
        ({"details": {"throughput_protocol": {"rates": []}}}, None, 7.0, None),
        ({"details": {"throughput_protocol": [1.0]}}, None, 7.0, None),
    ],
)
def test_the_value_of_a_run_or_why_it_has_none(
    change: JsonObject, metric: str | None, value: float | None, problem: str | None
) -> None:
    found = read_sample("r", {}, 1, {**RESULT, **change}, metric)
    assert (found.value, found.problem) == (value, problem)
    assert found.seconds == {**RESULT, **change}["wall_seconds"]


@pytest.mark.parametrize(
    ("details", "unit"),
    [
        ({"throughput_protocol": {"rates": [2.0], "unit": "tokens"}}, "tokens/s"),
        ({"throughput_protocol": {"rates": [2.0]}}, "samples/s"),
        ({"throughput": {"samples_per_second": 5}}, "samples/s"),
        ({}, "seconds"),
    ],
)
def test_the_unit_of_a_run_is_that_of_its_value(details: JsonObject, unit: str) -> None:
    assert read_sample("r", {}, 1, {**RESULT, "details": details}, None).unit == unit


def offers(*samples: Sample, published: tuple[PublishedSeries, ...] = ()) -> tuple[list[Offer], str]:
    rows: list[Row] = make_rows(samples, published)
    return list_offers(rows)


def test_an_offer_is_the_time_and_the_cost_of_a_thousand_units() -> None:
    """200 images/s: 5 s for 1 000. The run took 50 s and cost 2.0: 5 s of it cost 0.2."""
    found, unit = offers(sample("a", 4, 200.0, price=2.0, seconds=50.0))
    assert (found, unit) == ([Offer("t, a", 4, 5.0, 0.2)], "price")


def test_without_all_prices_the_cost_is_time_of_workers() -> None:
    priced, free = sample("a", 4, 200.0, price=2.0, seconds=50.0), sample("b", 2, 100.0, seconds=1.0)
    assert offers(priced, free) == ([Offer("t, a", 4, 5.0, 20.0), Offer("t, b", 2, 10.0, 20.0)], "seconds of workers")
    timeless = sample("b", 2, 100.0, price=1.0, seconds=0.0)
    assert offers(priced, timeless)[1] == "seconds of workers"


def test_only_rates_of_the_experiment_itself_are_offers() -> None:
    assert offers(
        sample("a", 2, None, problem="x"),
        sample("b", 2, 0.0),
        sample("c", 2, 5.0, unit="seconds"),
        published=(PUBLISHED,),
    ) == ([], "seconds of workers")
