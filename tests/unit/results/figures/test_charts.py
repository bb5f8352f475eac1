"""Charts: right numbers, nothing mixed silently, nothing overlapping, from any set of archives."""

import csv
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.model.run import Run
from mlbench_cli.results.analysis.series import Series, collect
from mlbench_cli.results.archive.files import Archive, pack
from mlbench_cli.results.archive.seal import seal
from mlbench_cli.results.figures import files
from mlbench_cli.results.figures.chart import Chart
from mlbench_cli.results.figures.charts import draw, list_sheets
from task_images.contract import CATEGORIES
from tests import NIGHTLY
from tests.unit.results.runs import new_run, observation_of, sealed_run, spec, timings

NAMES = ["total_time", "speedup", "time_for_all_phases"]


def series(folder: Path, *runs: dict[str, Any]) -> Series:
    folders = [sealed_run(folder / str(index), **{"name": f"run-{index}", **run}) for index, run in enumerate(runs)]
    return collect(Archive.open(path) for path in folders)


def rows(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "summary.csv").read_text().splitlines()))


def test_figures_of_folders_zips_and_runs_whose_bytes_are_always_the_same(tmp_path: Path) -> None:
    one = sealed_run(tmp_path / "one", workers=1, seconds=100.0)
    sixteen = sealed_run(tmp_path / "sixteen", workers=16, seconds=20.0)
    two = sealed_run(tmp_path / "two", workers=2, seconds=60.0)
    pack(sixteen, tmp_path / "sixteen.zip")
    run = Run("0123456789ab", spec("run-2"), two, "2025-10-09T08:53:19.000Z")
    written = draw([one, tmp_path / "sixteen.zip", run], tmp_path / "charts")
    names = [*NAMES, "compute_speedup", "communication", "price_index", "metrics"]
    expected = [f"{name}{suffix}" for name in names for suffix in (".png", ".svg", ".csv")] + ["summary.csv"]
    assert sorted(path.name for path in written) == sorted(expected)
    assert sorted(path.name for path in (tmp_path / "charts").iterdir()) == sorted(expected)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written if path.suffix == ".png")
    found = rows(tmp_path / "charts")
    assert [row["workers"] for row in found] == ["1", "2", "16"]
    assert [row["speedup"] for row in found] == ["1", "1.66667", "5"]
    assert [row["efficiency"] for row in found] == ["1", "0.833333", "0.3125"]
    assert [row["price_index"] for row in found] == ["1", "0.72", "0.64"]
    for row in found:
        parts = sum(float(row[f"{name}_seconds"]) for name in CATEGORIES)
        assert parts == pytest.approx(float(row["seconds_mean"]), rel=1e-4)
    again = draw([run, tmp_path / "sixteen.zip", one], tmp_path / "again")
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in written]


def test_runs_that_failed_or_missed_do_not_count(tmp_path: Path) -> None:
    found = series(
        tmp_path,
        {"workers": 1, "seconds": 100.0},
        {"workers": 2, "seconds": 50.0},
        {"workers": 2, "seconds": 999.0, "outcome": "goal_missed"},
        {"workers": 4, "outcome": "failed"},
    )
    (group,) = found.groups
    assert [len(point.good) for point in group.points] == [1, 1, 0]
    assert [speedup and speedup.mean for speedup in map(group.speedup, group.points)] == [1.0, pytest.approx(2.0), None]
    assert {run.name for run in found.bad} == {"run-2", "run-3"}
    (text,) = [text for text in texts(found, "total_time")["total_time"] if "Excluded" in text]
    assert "run-2 (goal missed)" in " ".join(text.split())
    [labeled] = [point.share for group in found.groups for point in group.points if point.share]
    assert labeled == "1 of 2 reached it"
    assert "run-3 (failed)" in " ".join(text.split())


def test_a_speedup_can_ask_for_several_runs_of_each_size(tmp_path: Path) -> None:
    facts = ((1, 100.0), (1, 102.0), (2, 50.0))
    folders = [
        sealed_run(tmp_path / str(n), name=f"run-{n}", workers=workers, seconds=seconds)
        for n, (workers, seconds) in enumerate(facts)
    ]
    (group,) = collect((Archive.open(path) for path in folders), min_runs=2).groups
    assert [speedup and speedup.mean for speedup in map(group.speedup, group.points)] == [1.0, None]
    assert not group.has_speedup


def test_the_baseline_is_the_fewest_workers_that_succeeded(tmp_path: Path) -> None:
    found = series(
        tmp_path,
        {"workers": 1, "outcome": "failed"},
        {"workers": 2, "seconds": 80.0},
        {"workers": 8, "seconds": 40.0},
    )
    (group,) = found.groups
    assert group.baseline is group.points[1]
    shown = texts(found, "speedup")["speedup"]
    assert {"default method", "ideal", "Speedup"} <= set(shown)
    (chart,) = charts(found)["speedup"]
    assert [row["x"] for row in chart.rows if "style" not in row] == [2, 8]


def test_intervals_are_drawn_for_repeats_alone_and_written_to_the_table(tmp_path: Path) -> None:
    found = series(
        tmp_path,
        *({"workers": 1, "seconds": seconds, "seed": int(seconds)} for seconds in (90.0, 100.0, 110.0)),
        {"workers": 2, "seconds": 50.0},
    )
    logs = np.log([90.0, 100.0, 110.0])
    reach = 4.302653 * logs.std(ddof=1) / 3**0.5
    low, high = (float(np.exp(logs.mean() + turn * reach)) for turn in (-1, 1))
    bars = {
        name: [row["low"] for chart in own for row in chart.rows if "low" in row] for name, own in charts(found).items()
    }
    # No interval: the speedup of the baseline is 1 by definition, and there is one run; phases never have one.
    assert {name: bars[name] for name in NAMES if bars[name]} == {"total_time": [pytest.approx(low)]}
    one, two = csv.DictReader(found.to_csv().splitlines())
    assert (one["runs"], one["seconds_min"], one["seconds_max"]) == ("3", "90", "110")
    assert (float(one["seconds_low"]), float(one["seconds_high"])) == pytest.approx((low, high), rel=1e-5)
    assert (two["runs"], two["seconds_low"], two["seconds_high"], two["metric_low"]) == ("1", "", "", "")
    assert (one["metric"], one["metric_mean"]) == ("Prec@1", "80.5")
    assert float(two["samples_per_second"]) == pytest.approx(51200 / 45, rel=1e-5)  # a tenth is validation
    assert float(one["samples_per_second_low"]) < float(one["samples_per_second"])


def test_accuracy_after_time_has_a_figure_and_no_speedup(tmp_path: Path) -> None:
    goal = {"metric": "Prec@1", "comparison": ">=", "threshold": 80.0, "kind": "full", "value": 80.5}
    parameters = {"budget_seconds": 60.0}
    found = series(
        tmp_path,
        *(
            {"outcome": "budget_spent", "workers": workers, "seed": seed, "goal": {**goal, "last": last}}
            | {"parameters": parameters, "budget_seconds": 60.0}
            for workers, seed, last in ((1, 1, 60.0), (1, 2, 40.0), (2, 1, 80.5))
        ),
    )
    (chart,) = charts(found)["total_time"]
    assert [row["y"] for row in chart.rows] == pytest.approx([2400**0.5, 80.5])
    assert [row["few"] for row in chart.rows] == [True, True]
    assert chart.y.label == "Prec@1"
    assert [text for text in texts(found, "speedup")["speedup"] if "have no speedup" in text]


def test_settings_that_differ_make_groups_and_labels(tmp_path: Path) -> None:
    parameters = {"goal_full": 80.0, "goal_light": 70.0, "batch_size": 32}
    found = series(
        tmp_path,
        {"backend": "gloo"},
        {"backend": "mpi"},
        {"backend": "gloo", "parameters": parameters},
        {"backend": "gloo", "synthetic": True},
    )
    labels = {group.label: sum(len(point.good) for point in group.points) for group in found.groups}
    assert labels == {
        "gloo, batch_size=128": 1,
        "mpi, batch_size=128": 1,
        "gloo, batch_size=32": 1,
        "gloo, batch_size=128, synthetic data": 1,
    }


LOAD = {"kind": "machine", "elapsed_seconds": 100.0, "own_seconds": 100.0, "busy_seconds": 190.0, "cores": 2}


def test_conditions_are_in_every_figure_and_in_the_table(tmp_path: Path) -> None:
    found = series(
        tmp_path,
        {"workers": 1, "samples": [LOAD | {"time": 1_760_000_050.0, "busy_seconds": 101.0, "lock": "held"}]},
        {"workers": 2, "samples": [LOAD | {"time": 1_760_000_050.0, "lock": "held"}]},
        {"workers": 4, "samples": [LOAD | {"time": 1_760_000_050.0, "busy_seconds": 101.0}], "share_machine": True},
    )
    (group,) = found.groups
    assert [point.labels for point in group.points] == [(), ("contended",), ("crowded", "shared")]
    for name, shown in texts(found).items():
        words = " ".join(" ".join(shown).split())
        assert "contended (1 run: other processes used 0.9 of 2 CPUs on average)" in words, name
        assert "crowded (1 run: 4 ranks on 2 cores), shared (1 run: --share-" in words, name
    assert [row["conditions"] for row in csv.DictReader(found.to_csv().splitlines())] == [
        "",
        "contended",
        "crowded shared",
    ]
    (chart,) = charts(found)["total_time"]
    assert [row["note"] for row in chart.rows] == ["", "contended", "crowded, shared"]


MACHINE = {"cpu": "Intel Xeon", "cores": 2}


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ({"provenance": {"machine": MACHINE}}, {"provenance": {"machine": MACHINE | {"cores": 4}}}, "Xeon, 4 cores"),
        ({"provenance": {"machine": MACHINE}}, {}, "machine unknown"),
        ({"environment": MACHINE}, {"environment": MACHINE | {"cpu": "AMD EPYC"}}, "AMD EPYC, 2 cores"),
        ({"environment": {"code_digest": "a" * 64}}, {"environment": {"code_digest": "b" * 64}}, "code bbbb"),
        (
            {"engine": "kubernetes", "cluster": "a", "cluster_kind": "kind"},
            {"engine": "kubernetes", "cluster": "a", "cluster_kind": "gke/n1-standard-4"},
            "gke/n1-standard-4",
        ),
        (
            {"engine": "kubernetes", "cluster": "a"},
            {"engine": "kubernetes", "cluster": "b"},
            "cluster b",
        ),
        ({"cpus": 2.0, "environment": {"env": {}}}, {"cpus": 1.0, "environment": {"env": {}}}, "1 CPU per rank"),
        ({"environment": {"env": {"OMP_NUM_THREADS": "7"}}}, {}, "7 CPUs per rank"),
        ({"data": "digits"}, {"data": "mnist"}, "data mnist"),
        ({"environment": {"version": "2.16.0"}}, {}, "torch 2.16.0"),
    ],
)
def test_runs_that_are_not_comparable_never_share_a_curve(
    tmp_path: Path, one: dict[str, Any], other: dict[str, Any], words: str
) -> None:
    found = series(tmp_path, one | {"workers": 1}, other | {"workers": 2})
    assert len(found.groups) == 2
    assert not any(group.has_speedup for group in found.groups)
    assert any(words in group.label for group in found.groups)


def test_an_archive_that_is_given_twice_counts_once(tmp_path: Path) -> None:
    folder = sealed_run(tmp_path / "run", workers=2)
    pack(folder, tmp_path / "run.zip")
    draw([folder, tmp_path / "run.zip", folder], tmp_path / "charts")
    assert [row["runs"] for row in rows(tmp_path / "charts")] == ["1"]


def test_two_versions_of_one_run_are_refused(tmp_path: Path) -> None:
    one = sealed_run(tmp_path / "run", workers=2)
    one.rename(tmp_path / "first")
    other = sealed_run(tmp_path / "run", workers=2, seconds=50.0)
    with pytest.raises(UsageError, match="archives of one run, run-2, but differ"):
        collect([Archive.open(tmp_path / "first"), Archive.open(other)])


def test_a_run_that_failed_early_stays_with_those_it_would_have_joined(tmp_path: Path) -> None:
    known = {"provenance": {"machine": MACHINE}}
    found = series(tmp_path, known | {"workers": 1}, known | {"workers": 1, "outcome": "failed"})
    (group,) = found.groups
    assert [(len(point.good), len(point.bad)) for point in group.points] == [(1, 1)]


def test_synthetic_data_are_in_the_title(tmp_path: Path) -> None:
    everything = series(tmp_path / "a", {"synthetic": True})
    some = series(tmp_path / "b", {"synthetic": True}, {"synthetic": False})
    none = series(tmp_path / "c", {})
    assert texts(everything, "speedup")["speedup"][0].endswith("   SYNTHETIC DATA")
    assert texts(some, "speedup")["speedup"][0].endswith("   PARTLY SYNTHETIC DATA")
    assert not [text for text in texts(none, "speedup")["speedup"] if "SYNTHETIC" in text]


def test_figures_that_are_functional_only_are_in_title_and_subtitle(tmp_path: Path) -> None:
    kind = {"functional_only": "one machine"}
    everything = series(tmp_path / "a", kind)
    some = series(tmp_path / "b", kind | {"synthetic": True}, {"synthetic": True})
    for texts_of_file in texts(everything, *NAMES).values():
        assert texts_of_file[0].endswith("   FUNCTIONAL ONLY")
        assert [text for text in texts_of_file if "functional only\n" in text]
    assert texts(some, "speedup")["speedup"][0].endswith("   SYNTHETIC DATA   PARTLY FUNCTIONAL ONLY")
    assert [group.label for group in some.groups] == ["default method", "functional only"]


def test_one_archive_is_drawn_and_the_speedup_says_what_it_needs(tmp_path: Path) -> None:
    shown = texts(series(tmp_path, {"workers": 4}), "total_time", "speedup")
    assert [text for text in shown["total_time"] if "unknown-task: 100\u00a0s with 4 workers" in text]
    assert [text for text in shown["speedup"] if "mlbench run NAME 1 2 4" in text]


def test_tasks_without_result_count_as_whole_runs(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", spec(task="custom", argv=("python", "$HOME/_train_.py")), {0: ["hello"], 1: []})
    seal(run, observation_of(seconds=12.0))
    found = collect([Archive.open(run.folder)])
    assert found.groups[0].points[0].seconds.mean == 12.0
    assert [
        text
        for text in texts(found, "total_time")["total_time"]
        if "the seconds of the whole run" in " ".join(text.split())
    ]


def test_bars_of_phases_add_up_to_the_total(tmp_path: Path) -> None:
    found = series(tmp_path, {"workers": 1, "seconds": 90.0, "timings": timings(80.0)})
    (chart,) = charts(found)["time_for_all_phases"]
    assert sum(row["y"] for row in chart.rows) == pytest.approx(90.0)
    picture = files.draw(next(sheet for sheet in list_sheets(found) if sheet.name == "time_for_all_phases"))
    bars = [bar for container in picture.axes[0].containers for bar in container]
    assert sum(bar.get_width() for bar in bars) == pytest.approx(90.0)
    assert [bar.get_x() for bar in bars] == sorted(bar.get_x() for bar in bars)


def test_communication_inside_a_pass_is_drawn_with_it_and_explained(tmp_path: Path) -> None:
    spent = timings(80.0)
    spent["backward_and_communication"] = spent.pop("backward")
    del spent["communication"]
    (chart,) = charts(series(tmp_path, {"workers": 2, "seconds": 90.0, "timings": spent}))["time_for_all_phases"]
    assert "computing with messages in it" in chart.series
    assert "cannot be told from computing" in chart.caption


SETS: dict[str, list[dict[str, Any]]] = {
    "one group": [{"workers": count, "seconds": 400.0 / count**0.8} for count in (1, 2, 4, 8, 16)],
    "six groups of six": [
        {
            "workers": count,
            "backend": backend,
            "device": device,
            "seconds": 90_000.0 / count**0.7,
            **({"outcome": outcome} if count == 32 else {}),
        }
        for (backend, device), outcome in zip(
            itertools.product(("gloo", "nccl", "mpi"), ("cpu", "gpu")),
            ("failed", "goal_missed", "goal_reached") * 2,
            strict=True,
        )
        for count in (1, 2, 4, 8, 16, 32)
    ],
    "six tasks": [
        {"workers": count, "task": task, "seconds": scale / count, "synthetic": True}
        for task, scale in (
            ("a_task", 0.02),
            ("digits_task_with_a_long_name", 88),
            *((f"t{n}", 10.0**n) for n in range(4)),
        )
        for count in (1, 2, 4)
    ],
    "many parameters": [
        {"workers": count, "parameters": {f"parameter_{n}": f"{value}{n}" for n in range(9)}}
        for value in ("x" * 30, "y" * 30)
        for count in (1, 2)
    ],
    "failed alone": [{"outcome": "failed"}],
    "hidden communication": [
        {
            "workers": 2,
            "timings": timings(80.0) | timings(80.0, {"communication": 0.0}),
            "details": {"communication": {"messages": 9}},
        }
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS if NIGHTLY else ("one group", "six groups of six"))
def test_no_text_overlaps_another_or_leaves_the_figure(tmp_path: Path, name: str) -> None:
    found = series(tmp_path, *SETS[name])
    for sheet in list_sheets(found):
        check_texts(sheet.name, files.draw(sheet))


def check_texts(figure_name: str, figure: Any) -> None:
    """Every text lies within the figure, and none over another."""
    boxes = [(text.get_text(), text.get_window_extent()) for text in drawn(figure) if text.get_text().strip()]
    for text, box in boxes:
        inside = box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.width and box.y1 <= figure.bbox.height
        assert inside, f"{figure_name}: {text!r} leaves the figure"
    for (first, a), (second, b) in itertools.combinations(boxes, 2):
        width, height = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert width <= 1 or height <= 1, f"{figure_name}: {first!r} and {second!r} overlap"


def drawn(figure: Any) -> Iterator[Any]:
    """Every text that a reader of the figure sees."""
    yield from figure.texts
    for legend in figure.legends:
        yield from legend.get_texts()
    for axes in figure.axes:
        yield from axes.texts
        if not axes.axison:
            continue
        yield from (axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label)
        yield from axes.get_legend().get_texts() if axes.get_legend() else ()
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            yield from (tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high)


def charts(found: Series) -> dict[str, tuple[Chart, ...]]:
    """The charts of each file."""
    return {sheet.name: sheet.charts for sheet in list_sheets(found)}


def texts(found: Series, *names: str) -> dict[str, list[str]]:
    """Everything that is written in each file, or in those of these names, the title first."""
    return {
        sheet.name: [text.get_text() for text in drawn(files.draw(sheet))]
        for sheet in list_sheets(found)
        if not names or sheet.name in names
    }
