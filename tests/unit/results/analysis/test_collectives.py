"""Curves of collectives: read from archives, put together, beside the published ones, and drawn without overlaps."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.errors import DamagedArchive, UsageError
from mlbench_cli.results.analysis.collectives import Curve, figures_of, label_curves, read, select_published
from mlbench_cli.results.analysis.compare import compare
from mlbench_cli.results.analysis.series import collect
from mlbench_cli.results.archive.files import Archive, pack
from mlbench_cli.results.figures.collectives import collective_charts
from mlbench_cli.results.figures.files import Sheet
from mlbench_cli.results.figures.files import draw as draw_sheet
from tests import NIGHTLY
from tests.unit.results.figures.test_charts import check_texts, drawn
from tests.unit.results.runs import sealed_run

SIZES = [4 * 8**power for power in range(8)]
ALL = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "ping_pong", "bidirectional")


def measured_run(
    folder: Path,
    *,
    alpha: float = 100.0,
    series: Sequence[tuple[str, str, str]] = (("all_reduce", "fp32", "in_place"),),
    document: Any = None,
    **changes: Any,
) -> Path:
    """A sealed run of the task allreduce, whose collectives take `alpha` microseconds and a byte a nanosecond."""
    rows = [
        {
            **dict(zip(("collective", "dtype", "place"), one, strict=True)),
            "bytes": size,
            "p50_us": alpha + size / 1e3,
            "mean_us": 3 * alpha,  # for tasks that know no median
            "busbw": size / (alpha * 1e3 + size),
        }
        for one in series
        for size in SIZES
    ]
    fit = {"alpha_us": alpha, "algbw": 1.0, "off_mean": 0.07}
    fitted = [{**dict(zip(("collective", "dtype", "place"), one, strict=True)), "fit": fit} for one in series]
    workers = changes.setdefault("workers", 2)
    results = folder / "output" / "rank-0" / "results"
    results.mkdir(parents=True)
    document = {"ranks": workers, "rows": rows, "series": fitted} if document is None else document
    (results / "collectives.json").write_text(json.dumps(document))
    changes = {"task": "allreduce", "name": f"run-{workers}", "parameters": {}, **changes}
    return sealed_run(folder, "completed", **changes)


def curves_of(*folders: Path) -> list[Curve]:
    return [curve for folder in folders for curve in read(Archive.open(folder))]


def test_curves_are_read_from_folders_and_zips(tmp_path: Path) -> None:
    folder = measured_run(
        tmp_path / "run", series=[("reduce", "fp16", "out_of_place"), ("all_reduce", "fp32", "in_place")]
    )
    pack(folder, tmp_path / "run.zip")
    first, second = read(Archive.open(folder))
    assert (first.collective, first.dtype, first.place) == ("reduce", "fp16", "out_of_place")
    assert first.points[0] == pytest.approx((4, 100.004, 4 / 100_004))
    assert second.fit == {"alpha_us": 100.0, "algbw": 1.0, "off_mean": 0.07}
    assert second.facts["ranks"] == "2 ranks"
    assert "(local)" in second.machine
    assert read(Archive.open(tmp_path / "run.zip")) == [first, second]
    assert read(Archive.open(sealed_run(tmp_path / "other"))) == []


@pytest.mark.parametrize(
    "document",
    [{}, {"ranks": 2, "rows": [{}], "series": []}, {"ranks": 2, "rows": 3, "series": []}, [1], {"ranks": "x"}],
)
def test_foreign_rows_are_refused_by_name(tmp_path: Path, document: Any) -> None:
    folder = measured_run(tmp_path / "run", document=document)
    with pytest.raises(DamagedArchive, match="not as the task writes it") as caught:
        read(Archive.open(folder))
    assert caught.value.file == "output/rank-0/results/collectives.json"


def test_labels_say_what_differs_and_repeats_are_one_curve(tmp_path: Path) -> None:
    curves = curves_of(
        measured_run(tmp_path / "a", workers=2),
        measured_run(tmp_path / "b", workers=2, alpha=130.0, seed=1, name="other-2"),
        measured_run(tmp_path / "b2", workers=2, alpha=400.0, seed=2, name="third-2"),
        measured_run(tmp_path / "c", workers=2, backend="mpi", cluster="far"),
        measured_run(tmp_path / "d", workers=4),
    )
    found = {curve.label: curve for curve in label_curves(curves)}
    assert set(found) == {"gloo, 2 ranks, local (3 runs)", "mpi, 2 ranks, far", "gloo, 4 ranks, local"}
    repeats = found["gloo, 2 ranks, local (3 runs)"]
    assert repeats.points[0] == pytest.approx((4, 130.004, 4 / 130_004))  # medians
    assert repeats.fit == {"alpha_us": pytest.approx(210.0), "algbw": 1.0, "off_mean": pytest.approx(0.07)}
    assert repeats.run == "run-2 other-2 third-2"


def test_curves_that_differ_in_anything_but_repeats_are_drawn_apart(tmp_path: Path) -> None:
    curves = curves_of(
        measured_run(tmp_path / "a", parameters={"sizes": "small"}),
        measured_run(tmp_path / "b", parameters={"sizes": "large"}, seed=1, name="other-2"),
    )
    assert [curve.label for curve in label_curves(curves)] == [
        "gloo, 2 ranks, sizes=small",
        "gloo, 2 ranks, sizes=large",
    ]


def test_published_curves_are_those_of_the_same_device_type_and_ranks(tmp_path: Path) -> None:
    curves = curves_of(measured_run(tmp_path / "a", workers=4, series=[("all_reduce", "fp32", "in_place")]))
    found = select_published(curves)
    assert {(one.facts["backend"], one.facts["ranks"], one.facts["device"]) for one in found} == {
        ("mpi", "4 ranks", "cpu"),
        ("gloo", "4 ranks", "cpu"),
    }
    gloo = next(one for one in found if one.facts["backend"] == "gloo")
    assert gloo.points[-1][:2] == (400_000_000, 1_100_000)
    # Without runs of as many ranks, all of them.
    assert len(select_published(curves_of(measured_run(tmp_path / "b", workers=3)))) == 6
    halves = measured_run(tmp_path / "c", workers=2, series=[("all_reduce", "bf16", "in_place")])
    with pytest.raises(UsageError, match="in fp32 and fp16"):
        select_published(curves_of(halves))


def test_what_is_written_in_a_figure(tmp_path: Path) -> None:
    curves = curves_of(measured_run(tmp_path / "a"), measured_run(tmp_path / "b", workers=4, alpha=2500.0))
    for chart in collective_charts(label_curves(curves)):
        texts = [text.get_text() for text in drawn(draw_sheet(Sheet("x", "x", (chart,))))]
        plain = [text.replace("\N{NO-BREAK SPACE}", " ").replace("\n", " ") for text in texts]
        assert "gloo, 2 ranks: 100 µs + S / 1 GB/s (±7 %)" in plain
        assert "gloo, 4 ranks: 2.50 ms + S / 1 GB/s (±7 %)" in plain
        assert "16 KiB" in plain


SETS: dict[str, list[dict[str, Any]]] = {
    "one": [{}],
    "all collectives in both places": [
        {
            "series": [(name, "fp32", place) for name in ALL for place in ("in_place", "out_of_place")],
            "backend": backend,
        }
        for backend in ("gloo", "a-backend-with-a-rather-long-name")
    ],
    "many runs": [
        {"workers": workers, "backend": backend, "cpus": cpus}
        for workers, backend, cpus in itertools.product((2, 4), ("gloo", "mpi"), (1.0, 2.0))
    ],
    "beside the published": [{"workers": 2}, {"workers": 4}, {"workers": 8}],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS if NIGHTLY else ("all collectives in both places", "beside the published"))
def test_no_text_overlaps_another_or_leaves_the_figure(tmp_path: Path, name: str) -> None:
    curves = curves_of(*(measured_run(tmp_path / str(index), **changes) for index, changes in enumerate(SETS[name])))
    curves += select_published(curves) if "published" in name else []
    charts = tuple(collective_charts(label_curves(curves)))
    check_texts(name, draw_sheet(Sheet("x", "x", charts)))


def test_two_runs_are_compared_by_latency_and_bandwidth(tmp_path: Path) -> None:
    a, b = (measured_run(tmp_path / str(alpha), alpha=alpha) for alpha in (100.0, 50.0))
    assert figures_of(Archive.open(a))["all_reduce fp32, alpha us"] == 100.0
    found = compare([Archive.open(a)], [Archive.open(b)])
    row = found.rows["all_reduce fp32, alpha us"]
    assert row.ratio is not None
    assert row.ratio.mean == pytest.approx(0.5)
    assert "all_reduce fp32, best busbw GB/s" in found.rows


def test_long_lists_of_sizes_that_begin_alike_are_told_apart(tmp_path: Path) -> None:
    sizes = [8 * 2**power for power in range(24)]
    runs = [
        measured_run(tmp_path / name, name=f"{name}-2", parameters={"sizes": chosen})
        for name, chosen in (("a", sizes), ("b", sizes[:-1]))
    ]
    found = collect(Archive.open(run) for run in runs)
    assert [len(group.points[0].good) for group in found.groups] == [1, 1]
    assert {group.label for group in found.groups} == {
        "sizes=24 from 8 to 67108864 (ad0c8c)",
        "sizes=23 from 8 to 33554432 (e36354)",
    }


def test_one_rank_has_a_latency_but_no_bandwidth(tmp_path: Path) -> None:
    rows = [
        {"collective": "all_reduce", "dtype": "fp32", "place": "in_place", "bytes": size, "p50_us": None}
        | {"mean_us": 5.0, "busbw": 0.0}
        for size in SIZES
    ]
    curves = curves_of(measured_run(tmp_path / "a", workers=1, document={"ranks": 1, "rows": rows, "series": []}))
    assert [chart.key for chart in collective_charts(label_curves(curves))] == ["collective0-latency"]
