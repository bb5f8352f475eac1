"""Series in the format of MLBench 3, from documents in memory: names, units, totals and rates."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlbench_cli.results.archive.mlbench_v3 import machine_series, original_names, task_series
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.util.times import timestamp

END = "2026-01-01T01:00:00.000Z"


def archive(
    metrics: Sequence[Mapping[str, Any]] = (),
    samples: Sequence[Mapping[str, Any]] = (),
    timings: Mapping[str, float] | None = None,
    training: float | None = None,
    workers: int = 2,
    goal: str | None = "Prec@1",
) -> Archive:
    result = {
        "goal": None if goal is None else {"metric": goal},
        "task_seconds": {"wall": 99.0, "training": training},
        "timings": {name: {"rank0": value, "mean": 0.0} for name, value in (timings or {}).items()},
        "workers": workers,
        "finished": END,
    }
    return cast(
        Archive,
        SimpleNamespace(
            run={"name": "demo-2"},
            result=result,
            metrics=lambda: iter(metrics),
            resources=lambda: iter(samples),
        ),
    )


def metric(name: str, value: Any = 0.5, rank: int = 0, at: float = 1.0) -> dict[str, Any]:
    return {"rank": rank, "time": timestamp(at), "name": name, "value": value}


@pytest.mark.parametrize(
    ("name", "rank", "goal", "names"),
    [
        ("val_Prec@1", 0, "Prec@1", ["val_Prec@1", "val_global_Prec@1"]),
        ("val_Prec@1", 1, "Prec@1", ["val_Prec@1"]),
        ("Prec@1", 1, "Prec@1", ["val_Prec@1"]),
        ("Prec@5", 0, "Prec@1", ["Prec@5"]),
        ("val_global_loss", 0, None, ["val_loss", "val_global_loss"]),
        ("global_loss", 0, None, ["global_loss"]),
        ("val_val_loss", 0, None, ["val_val_loss", "val_global_val_loss"]),
        ("train_Prec@1", 0, "train_Prec@1", ["val_train_Prec@1", "val_global_train_Prec@1"]),
    ],
)
def test_validation_metrics_of_rank_0_are_global_too(name: str, rank: int, goal: str | None, names: list[str]) -> None:
    assert list(original_names({"name": name, "rank": rank}, goal)) == names


def test_every_value_of_a_metric_is_a_text_with_its_date() -> None:
    rows = [metric("train_loss", 2.0, at=1.5), metric("train_loss", "nan", at=2.5), metric("train_loss", 1, rank=3)]
    assert task_series(archive(rows)) == {
        "result_train_loss @ 0": [
            {"date": "1970-01-01T00:00:01.500Z", "value": "2.0", "cumulative": False},
            {"date": "1970-01-01T00:00:02.500Z", "value": "nan", "cumulative": False},
        ],
        "result_train_loss @ 3": [{"date": "1970-01-01T00:00:01.000Z", "value": "1", "cumulative": False}],
    }


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("a/b", "a_b"),
        ("../x", ".._x"),
        ("Prec@1 (top=1),+50%-x.y_z", "Prec@1 (top=1),+50%-x.y_z"),
        ("größe", "größe"),
        ("a\nb*c", "a_b_c"),
        ("x" * 200, "x" * 150),
    ],
)
def test_names_are_safe_as_names_of_files(name: str, safe: str) -> None:
    assert list(task_series(archive([metric(name)], goal=None))) == [f"result_{safe} @ 0"]


@pytest.mark.parametrize(
    ("timings", "training", "workers", "totals"),
    [
        (
            {"forward": 4.0, "backward": 3.0, "communication": 2.0, "validation": 50.0, "data_wait": 9.0},
            10.0,
            2,
            {
                "CumulativeTrainTimeEpoch": 10.0,
                "TotalCumulativeTrainTime": 10.0,
                "global_cum_CumulativeTrainTimeEpoch": 10.0,
                "global_cum_agg": 2.0,
                "global_cum_backprop": 3.0,
                "global_cum_end": 1.0,
                "global_cum_fwd_pass": 4.0,
            },
        ),
        # More was measured than the training took: nothing is left.
        (
            {"loss": 9.0, "optimizer": 9.0},
            10.0,
            2,
            {
                "CumulativeTrainTimeEpoch": 10.0,
                "TotalCumulativeTrainTime": 10.0,
                "global_cum_CumulativeTrainTimeEpoch": 10.0,
                "global_cum_comp_loss": 9.0,
                "global_cum_end": 0.0,
                "global_cum_opt_step": 9.0,
            },
        ),
        (
            {"preprocessing": 1.0, "metrics": 2.0},
            None,
            2,
            {"global_cum_batch_load": 1.0, "global_cum_comp_metrics": 2.0},
        ),
        ({"communication": 0.0}, None, 1, {}),  # a single worker aggregated nothing
        ({"communication": 0.0}, None, 2, {"global_cum_agg": 0.0}),
        ({"communication": 0.5}, None, 1, {"global_cum_agg": 0.5}),
    ],
)
def test_seconds_of_rank_0_have_the_original_names(
    timings: dict[str, float], training: float | None, workers: int, totals: dict[str, float]
) -> None:
    found = task_series(archive(timings=timings, training=training, workers=workers))
    assert found == {
        f"result_{name} @ 0": [{"date": END, "value": str(value), "cumulative": False}]
        for name, value in totals.items()
    }


# --- machines ---------------------------------------------------------------------------------------------------------


def sample(at: float, rank: int = 0, **fields: Any) -> dict[str, Any]:
    return {"time": timestamp(at), "rank": rank, **fields}


def values(series: Mapping[str, Sequence[Mapping[str, Any]]], name: str) -> list[float]:
    return [float(each["value"]) for each in series.get(name, ())]


def test_cores_in_use_are_seconds_per_second_between_samples() -> None:
    rows = [sample(at, cpu_seconds=used) for at, used in ((0, 0.0), (5, 10.0), (5, 11.0), (10, 12.0), (15, 11.0))]
    found = machine_series(archive(samples=rows))
    assert values(found, "demo-2-0_cpu") == [2.0, pytest.approx(0.2), 0.0]  # not below nothing
    assert found["demo-2-0_cpu"][0] == {"date": timestamp(5), "value": "2.0", "cumulative": False}


def test_every_pod_has_its_rates() -> None:
    rows = [sample(at, rank, cpu_seconds=(rank + 1.0) * at, pod=f"p{rank}") for at in (0, 1, 2) for rank in (0, 1)]
    found = machine_series(archive(samples=rows))
    assert {name: values(found, name) for name in found} == {"p0_cpu": [1.0, 1.0], "p1_cpu": [2.0, 2.0]}


@pytest.mark.parametrize(
    ("fields", "name"),
    [({"pod": "a/b"}, "a_b"), ({"pod": ""}, "demo-2-7"), ({"pod": 3}, "demo-2-7"), ({}, "demo-2-7")],
)
def test_a_pod_has_a_safe_name_or_that_of_its_rank(fields: dict[str, Any], name: str) -> None:
    assert list(machine_series(archive(samples=[sample(1, 7, rss_bytes=1 << 20, **fields)]))) == [f"{name}_memory"]


def test_gauges_are_mebibytes_and_traffic_is_cumulative() -> None:
    row = sample(1, rss_bytes=3 << 20, received_bytes=1 << 19, sent_bytes=1 << 21, read_bytes=1 << 20)
    found = machine_series(archive(samples=[row]))
    assert found == {
        f"demo-2-0_{name}": [{"date": timestamp(1), "value": value, "cumulative": cumulative}]
        for name, value, cumulative in (
            ("memory", "3.0", False),
            ("network_in", "0.5", True),
            ("network_out", "2.0", True),
        )
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"time": 5.0, "rss_bytes": 1},
        {"rss_bytes": 0},
        {"rss_bytes": "1"},
        {"rss_bytes": None, "cpu_seconds": True},
        {"rss_bytes": -5},
    ],
)
def test_what_was_not_measured_has_no_series(fields: dict[str, Any]) -> None:
    assert machine_series(archive(samples=[{**sample(1), **fields}])) == {}
