"""The sections of a report: their tables, notes and figures, each by hand from a few runs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.results.figures.look import Look
from mlbench_cli.results.figures.model import Axis, Figure, Line
from mlbench_cli.results.report.collect import collect
from mlbench_cli.results.report.model import Note, Report, ReportTable, Section, Tone
from tests.unit.results.runs import sealed_run

ENVIRONMENT = {"framework_version": "2.15.0", "version": None, "python": "3.12.1", "device_name": "x86_64"}
MACHINE = {"platform": "Linux 6.1", "architecture": "x86_64", "cores": 2, "memory_bytes": 3 << 29, "cpu": "Xeon"}
PROVENANCE: dict[str, Any] = {
    "mlbench": "4.0.0",
    "python": "3.12.1",
    "packages": {},
    "session": "s",
    "machine": {**MACHINE, "gpus": []},
    "command_line": ["mlbench", "run", "my run"],
}
STEP: Look = ("step", 0)
TOPK: Look = ("sparse", 1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Sealed runs by name: two methods on 1, 2 and 4 workers, of which two did not reach the goal; and another task."""
    folder = tmp_path_factory.mktemp("runs")
    made = {}

    def add(name: str, workers: int, seconds: float, outcome: str = "goal_reached", **changes: Any) -> None:
        method = {"name": name.partition("-")[0]}
        fields = {"environment": ENVIRONMENT, "provenance": PROVENANCE, "method": method, **changes}
        made[name] = sealed_run(folder / name, outcome, name=name, workers=workers, seconds=seconds, **fields)

    add("bsp-1-r1", 1, 100.0)
    add("bsp-1-r2", 1, 104.0)
    for number, seconds in enumerate((60.0, 62.0, 61.0), 1):
        add(f"bsp-2-r{number}", 2, seconds)
    add("topk-2-r1", 2, 30.0)
    add("topk-2-r2", 2, 32.0, "failed")
    add("topk-4-r1", 4, 20.0, "goal_missed", seed=43)
    add("bsp-other", 1, 50.0, task="other", synthetic=True, data="generated")
    return made


def open_runs(runs: Mapping[str, Path], *names: str) -> list[Archive]:
    return [Archive.open(runs[name]) for name in names]


def copies(runs: Mapping[str, Path], count: int) -> list[Archive]:
    """One run several times under other names, r0, r1 and so on."""
    made = []
    for number in range(count):
        archive = Archive.open(runs["bsp-1-r1"])
        archive.run["id"] = archive.run["name"] = f"r{number}"
        archive.path = Path(f"r{number}")
        made.append(archive)
    return made


def method_runs(runs: Mapping[str, Path]) -> list[Archive]:
    return open_runs(runs, *(name for name in runs if name != "bsp-other"))


@pytest.fixture(scope="module")
def report(runs: dict[str, Path]) -> Report:
    return collect(method_runs(runs))


def section(report: Report, heading: str) -> Section:
    return next(each for each in report.sections if each.heading == heading)


def find(archive: Archive, **finding: Any) -> None:
    """Add a finding to those of an archive."""
    findings: list[Any] = archive.findings
    findings.append(finding)


def table(report: Report, heading: str) -> ReportTable:
    [found] = section(report, heading).tables
    return found


def plain(rows: tuple[tuple[str, ...], ...]) -> list[tuple[str, ...]]:
    return [tuple(cell.replace("\u00a0", " ") for cell in row) for row in rows]


def cells(found: ReportTable) -> dict[str, str]:
    """A table with two columns."""
    return dict(plain(found.rows))  # type: ignore[arg-type]


# --- top of the page ------------------------------------------------------------------------------------------------


def test_the_context_names_task_goal_place_and_date(report: Report) -> None:
    assert report.context == "unknown-task · Prec@1 >= 80 · this machine · 2025-10-09"
    assert report.runs == (
        *("bsp-1-r1", "bsp-1-r2", "bsp-2-r1", "bsp-2-r2", "bsp-2-r3", "topk-2-r1", "topk-2-r2", "topk-4-r1"),
    )


def test_a_context_of_many_tasks_and_places_is_short(runs: dict[str, Path]) -> None:
    archives = copies(runs, 4)
    for number, archive in enumerate(archives):
        archive.result["task"] = archive.run["spec"]["task"] = f"t{number}"
        archive.result["cluster"] = f"c{number}"
        archive.result["finished"] = f"2026-01-0{number + 1}T00:00:00.000Z"
    assert collect(archives).context == "t0, t1, t2 and more · Prec@1 >= 80 · c0, c1, c2 and more · 2026-01-04"
    assert collect(archives[:3]).context == "t0, t1, t2 · Prec@1 >= 80 · c0, c1, c2 · 2026-01-03"


def test_a_run_alone_has_its_own_summary_as_the_title(runs: dict[str, Path]) -> None:
    alone = collect(open_runs(runs, "bsp-1-r1"))
    assert alone.title == "bsp-1-r1 reached its goal: Prec@1 80.5 (>= 80) after 100.0 s"
    assert alone.headline == ()
    assert [each.name for each in alone.numbers] == ["Time to goal", "Throughput"]
    assert collect(open_runs(runs, "bsp-1-r1"), title="Mine").title == "Mine"


def test_the_headline_repeats_nothing_of_the_title(report: Report) -> None:
    assert report.title.replace("\u00a0", " ") == "unknown-task reaches its goal in 30.0 s with 2 workers (topk)"
    assert report.headline == ("Too few runs to tell bsp and topk apart on 2 workers; at least 3 of each are needed.",)


def test_warnings_name_their_runs_and_come_before_what_was_left_out(runs: dict[str, Path]) -> None:
    found = collect(method_runs(runs), left_out=["x.zip is damaged."])
    assert found.warnings == (
        "1 run was left out of all times (failed): topk-2-r2.",
        "1 run was crowded: topk-4-r1 (4 ranks on 2 cores).",
        "1 run was left out of all times (goal missed): topk-4-r1.",
        "x.zip is damaged.",
    )


def test_a_warning_counts_its_runs(runs: dict[str, Path]) -> None:
    archives = open_runs(runs, "bsp-1-r1", "bsp-1-r2")
    for archive in archives:
        archive.result["synthetic"] = True
        archive.result["label"] = {"word": "functional", "reason": "one node"}
    assert collect(archives).warnings == (
        "2 runs were functional only, not a performance measurement: one node: bsp-1-r1, bsp-1-r2.",
        "2 runs were on synthetic data: bsp-1-r1, bsp-1-r2.",
    )


# --- results --------------------------------------------------------------------------------------------------------


def test_the_table_of_results_has_a_row_per_series_and_size(report: Report) -> None:
    found = table(report, "All sizes")
    assert found.title == "Results by series and number of workers"
    assert found.head == (
        *("series", "workers", "runs", "time", "interval", "speed-up", "efficiency", "throughput"),
        *("top-1 accuracy", "conditions"),
    )
    assert plain(found.rows) == [
        ("bsp", "1", "2", "102 s", "100 to 104 range", "1×", "100 %", "558 samples/s", "80.5 %", "–"),
        # 102 s / 61 s, and half of that; 61 ± t(0.975, 2) / sqrt(3) s
        ("bsp", "2", "3", "61.0 s", "58.5 to 63.5", "1.67×", "84 %", "933 samples/s", "80.5 %", "–"),
        ("topk", "2", "1 of 2", "30.0 s", "one run", "–", "–", "1.90k samples/s", "80.5 %", "failed"),
        ("topk", "4", "0 of 1", "–", "–", "–", "–", "–", "61.2 %", "failed, crowded"),
    ]
    assert found.numeric == (1, 2, 3, 5, 6, 7, 8)
    assert (found.bar_column, found.looks) == (3, (STEP, STEP, TOPK, TOPK))
    assert found.shares == pytest.approx((1.0, 61 / 102, 30 / 102, 0.0))
    assert found.tones == (Tone.PLAIN, Tone.PLAIN, Tone.BAD, Tone.BAD)


def test_columns_without_values_and_a_single_series_are_left_out(runs: dict[str, Path]) -> None:
    found = table(collect(open_runs(runs, "bsp-1-r1")), "Results")
    assert found.head == ("workers", "runs", "time", "interval", "throughput", "top-1 accuracy")
    assert plain(found.rows) == [("1", "1", "100 s", "one run", "569 samples/s", "80.5 %")]
    assert (found.numeric, found.bar_column, found.tones, found.shares) == ((0, 1, 2, 4, 5), 2, (), (1.0,))


def test_a_table_of_failures_has_neither_times_nor_bars(runs: dict[str, Path]) -> None:
    found = table(collect(open_runs(runs, "topk-2-r2")), "Results")
    assert found.head == ("workers", "runs", "time", "conditions")
    assert plain(found.rows) == [("2", "0 of 1", "–", "failed")]
    assert (found.shares, found.tones) == ((0.0,), (Tone.BAD,))


def test_a_condition_of_good_runs_is_a_warning(runs: dict[str, Path]) -> None:
    [archive] = open_runs(runs, "topk-4-r1")
    archive.result["outcome"] = "goal_reached"
    found = table(collect([archive]), "Results")
    assert (found.rows[0][-1], found.tones) == ("crowded", (Tone.WARN,))


def test_several_jobs_have_a_row_each(runs: dict[str, Path]) -> None:
    report = collect([*method_runs(runs), *open_runs(runs, "bsp-other")])
    assert report.title == "2 jobs, 9 runs"
    assert report.headline == ("Only runs of one job are compared: equal task, preset, goal and data.",)
    found = table(report, "Jobs")
    assert found.head == ("job", "what differs", "runs", "best", "by", "conditions")
    assert plain(found.rows) == [
        ("other", "1 worker", "1", "50.0 s", "1 worker", "–"),
        ("unknown-task", "2 methods, 1 to 4 workers", "8", "30.0 s", "2 workers (topk)", "1 crowded, 2 failed"),
    ]
    assert found.numeric == (2, 3)
    alone, several = section(report, "other"), section(report, "unknown-task")
    assert (alone.tables, alone.figures) == ((), ())
    assert [text.replace("\u00a0", " ") for text in alone.paragraphs] == ["50.0 s with 1 worker (bsp)."]
    assert [figure.key for figure in several.figures] == ["job2-time", "job2-phases", "job2-way"]
    assert len(several.tables) == 1


def test_a_job_without_a_success_has_no_best(runs: dict[str, Path]) -> None:
    report = collect(open_runs(runs, "topk-2-r2", "bsp-other"))
    assert plain(table(report, "Jobs").rows)[1] == ("unknown-task", "2 workers", "1", "–", "–", "1 failed")
    assert section(report, "unknown-task").paragraphs == ("unknown-task: no run succeeded.",)


def test_networks_that_differ_are_counted(runs: dict[str, Path]) -> None:
    archives = open_runs(runs, "bsp-1-r1", "bsp-1-r2", "bsp-other")
    archives[0].run["spec"]["network"] = "1gbit"
    assert plain(table(collect(archives), "Jobs").rows)[1][1] == "2 networks, 1 worker"


# --- findings -------------------------------------------------------------------------------------------------------


def test_findings_of_failed_runs_come_first_and_name_the_next_command(runs: dict[str, Path]) -> None:
    archives = method_runs(runs)
    for archive in archives:
        name = archive.run["name"]
        if name in ("bsp-1-r1", "bsp-1-r2"):
            find(archive, code="slow-disk", summary="The disk is slow.", hint="")
        if name == "topk-2-r2":
            find(archive, code="oom", summary="Killed.", hint="mlbench run --memory 8G")
    notes = section(collect(archives, left_out=["x is out."]), "Findings").notes
    assert notes == (
        Note("topk-2-r2: Killed.", "(oom)", "mlbench run --memory 8G", Tone.BAD),
        Note("bsp-1-r1, bsp-1-r2: The disk is slow.", "(slow-disk)", "", Tone.WARN),
        Note("1 run was left out of all times (failed):", "topk-2-r2.", "", Tone.WARN),
        Note("1 run was crowded:", "topk-4-r1 (4 ranks on 2 cores).", "", Tone.WARN),
        Note("1 run was left out of all times (goal missed):", "topk-4-r1.", "", Tone.WARN),
        Note("x is out.", "", "", Tone.WARN),
    )


def test_a_finding_of_a_run_that_missed_its_goal_is_a_warning(runs: dict[str, Path]) -> None:
    [archive] = open_runs(runs, "topk-4-r1")
    find(archive, code="slow", summary="Slow.", hint=None)
    assert section(collect([archive]), "Findings").notes[0] == Note("topk-4-r1: Slow.", "(slow)", "", Tone.WARN)


def test_runs_without_findings_say_so(runs: dict[str, Path]) -> None:
    found = section(collect(open_runs(runs, "bsp-1-r1")), "Findings")
    assert (found.paragraphs, found.notes) == (("No findings.",), ())


def test_a_comparison_across_divisions_has_a_note(runs: dict[str, Path]) -> None:
    archives = open_runs(runs, "bsp-1-r1", "bsp-1-r2")
    archives[0].result["division"] = {"word": "open", "reason": None}
    assert section(collect(archives), "Findings").notes == (
        Note("Not all runs are in the same division.", "Quote a comparison across divisions with this note."),
    )


# --- settings -------------------------------------------------------------------------------------------------------


def test_what_differs_has_values_in_the_order_of_the_series(report: Report) -> None:
    found = section(report, "Settings")
    assert found.commands == ("mlbench run 'my run'",)
    assert plain(found.tables[0].rows) == [("method", "bsp, topk"), ("workers", "1, 2, 4"), ("seed", "42, 43")]


def test_many_seeds_are_cut_and_commands_of_others_are_no_commands(runs: dict[str, Path]) -> None:
    archives = copies(runs, 9)
    for number, archive in enumerate(archives):
        archive.run["spec"]["seed"] = number
        archive.run["provenance"] = {**PROVENANCE, "command_line": ["mlbench" if number < 7 else "rm", str(number)]}
    found = section(collect(archives), "Settings")
    assert cells(found.tables[0])["seed"] == "0, 1, 2, 3, 4, 5, 6, 7 and more"
    assert found.commands == tuple(f"mlbench {number}" for number in range(6))
    assert cells(table(collect(archives[:8]), "Settings"))["seed"] == "0, 1, 2, 3, 4, 5, 6, 7"


def test_settings_without_differences_have_no_table(runs: dict[str, Path]) -> None:
    assert section(collect(open_runs(runs, "bsp-1-r1", "bsp-1-r2")), "Settings").tables == ()


def test_equal_settings_are_folded_and_counted(report: Report) -> None:
    found = section(report, "Settings that are equal for all runs")
    rows = cells(found.tables[0])
    assert rows == {
        "task": "unknown-task",
        "backend": "gloo",
        "device": "cpu",
        "preset": "spec",
        "cluster": "local",
        "machine": "Xeon, 2 cores",
        "processes per worker": "1",
        "gpus per worker": "0",
        "cpus": "1",
        "framework": "torch 2.15.0",
        "batch size": "128",
        "goal full": "80.0",
        "goal light": "70.0",
        "goal": "Prec@1 >= 80",
        "metric": "Prec@1",
        "engine": "local",
        "data": "digits",
        "division": "none",
        "judge": "3",
    }
    assert (found.is_folded, found.summary) == (True, str(len(rows)))


def test_settings_of_several_jobs_have_a_table_each_without_the_equal_ones(runs: dict[str, Path]) -> None:
    report = collect([*method_runs(runs), *open_runs(runs, "bsp-other")])
    found = section(report, "Settings of each job")
    equal, other, unknown = found.tables
    assert not {"task", "method", "data", "synthetic"} & cells(equal).keys()
    assert (other.title, cells(other)) == (
        "other",
        {"task": "other", "method": "bsp", "data": "generated", "synthetic": "synthetic data"},
    )
    assert (unknown.title, cells(unknown)) == (
        "unknown-task",
        {"task": "unknown-task", "method": "bsp; topk", "data": "digits"},
    )
    assert found.summary == str(len(equal.rows) + 4 + 3)
    assert section(report, "Settings").tables == ()


def test_machines_and_software_are_listed_once(report: Report) -> None:
    found = section(report, "Machines")
    assert cells(found.tables[0]) == {
        "mlbench": "4.0.0",
        "framework": "torch 2.15.0",
        "Python": "3.12.1",
        "device": "x86_64",
        "processor": "Xeon",
        "cores": "2",
        "memory": "1.5 GiB",
        "operating system": "Linux 6.1",
        "cluster": "local",
    }
    assert (found.is_folded, found.summary) == (True, "Xeon, 2, 1.5 GiB, torch 2.15.0")


def test_machines_that_differ_are_beside_each_other_and_unknown_facts_are_left_out(runs: dict[str, Path]) -> None:
    first, second, third = open_runs(runs, "bsp-1-r1", "bsp-1-r2", "bsp-2-r1")
    second.run["provenance"] = {**PROVENANCE, "machine": {**MACHINE, "cpu": "EPYC", "memory_bytes": None}}
    third.run["provenance"] = None
    third.environment["ranks"] = {}
    found = cells(table(collect([first, second, third]), "Machines"))
    assert (found["processor"], found["memory"], found["framework"]) == ("EPYC; Xeon", "1.5 GiB", "torch 2.15.0")


# --- runs -----------------------------------------------------------------------------------------------------------


def test_every_run_has_a_row(runs: dict[str, Path], report: Report) -> None:
    found = section(report, "Runs")
    [rows] = found.tables
    assert rows.head == ("run", "workers", "outcome", "time", "goal", "method", "conditions", "division", "id")
    ids = {name: str(Archive.open(path).run["id"]) for name, path in runs.items()}
    shown = plain(rows.rows)
    goal = "top-1 accuracy 80.5 %, goal 80"
    assert shown[0] == ("bsp-1-r1", "1", "goal reached", "100 s", goal, "bsp", "–", "none", ids["bsp-1-r1"])
    assert shown[6:] == [
        ("topk-2-r2", "2", "failed", "–", "–", "topk", "–", "none", ids["topk-2-r2"]),
        (
            *("topk-4-r1", "4", "goal missed", "20.0 s", "top-1 accuracy 61.2 %, goal 80", "topk", "crowded", "none"),
            ids["topk-4-r1"],
        ),
    ]
    assert rows.numeric == (1, 3)
    assert found.paragraphs == ("No division: a task that this mlbench does not know.",)
    assert (found.is_folded, found.summary) == (True, "8, of which 6 succeeded")


def test_the_order_of_archives_changes_nothing_and_a_run_counts_once(runs: dict[str, Path], report: Report) -> None:
    again = collect([*method_runs(runs)[::-1], *open_runs(runs, "bsp-1-r1")])
    assert again.runs == report.runs
    assert again.sections == report.sections


# --- figures --------------------------------------------------------------------------------------------------------


def test_the_way_to_the_goal_is_that_of_the_largest_size_that_all_series_have(report: Report) -> None:
    way = next(figure for figure in report.figures if figure.key == "job1-way")
    assert way.title == "Progress toward the goal, 2 workers"
    assert way.y.label == "top-1 accuracy, %"
    assert way.caption == "One line per run; repeats share a color."
    found = [(line.label, line.xs[-1], line.is_named, line.color, line.shape) for line in way.lines]
    assert found == [
        ("bsp", 60.0, True, "step", 0),
        ("bsp", 62.0, False, "step", 0),
        ("bsp", 61.0, False, "step", 0),
        ("topk", 30.0, True, "sparse", 1),
        ("goal: 80", 62.0, True, "", 0),
    ]
    assert [line.reference for line in way.lines] == [False] * 4 + [True]


def test_the_way_of_one_size_has_no_number_of_workers_and_takes_the_place_of_the_metric(runs: dict[str, Path]) -> None:
    report = collect(open_runs(runs, "bsp-2-r1", "topk-2-r1"))
    way = next(figure for figure in report.figures if figure.key == "job1-way")
    assert (way.title, way.caption) == ("Progress toward the goal", "")
    assert "job1-goal-metric" not in [figure.key for figure in report.figures]


def test_series_without_a_common_size_are_drawn_at_their_largest(runs: dict[str, Path]) -> None:
    report = collect(open_runs(runs, "bsp-1-r1", "topk-2-r1"))
    way = next(figure for figure in report.figures if figure.key == "job1-way")
    assert [line.label for line in way.lines] == ["topk", "goal: 80"]


def test_more_figures_are_named_in_the_line_that_folds_them(report: Report) -> None:
    found = section(report, "More figures")
    assert found.is_folded
    assert found.summary == f"{len(found.figures)}: speed-up, efficiency, compute-only speed-up …"
    keys = [figure.key for figure in found.figures]
    assert not {"job1-time", "job1-phases", "job1-way"} & set(keys)
    assert [figure.key for figure in section(report, "Figures").figures] == ["job1-time", "job1-phases", "job1-way"]


def test_several_jobs_fold_their_figures_apart(runs: dict[str, Path]) -> None:
    report = collect([*method_runs(runs), *open_runs(runs, "bsp-other")])
    alone = section(report, "More figures: other")
    assert all(figure.key.startswith("job1-") for figure in alone.figures)
    assert all(figure.key.startswith("job2-") for figure in section(report, "More figures: unknown-task").figures)
    titles = [figure.title[:1].lower() + figure.title[1:] for figure in alone.figures[:3]]
    more = " …" if len(alone.figures) > 3 else ""
    assert alone.summary == f"{len(alone.figures)}: {', '.join(titles)}{more}"


@pytest.mark.parametrize(("count", "words"), [(4, ()), (5, ("1 more",))])
def test_machines_are_drawn_of_the_largest_runs(runs: dict[str, Path], count: int, words: tuple[str, ...]) -> None:
    found = section(collect(method_runs(runs)[:count]), "Runs and machines over time")
    assert len(found.paragraphs) == len(words)
    assert all(f"Machines of the 4 largest runs; {word}" in found.paragraphs[0] for word in words)
    assert (found.is_folded, found.summary) == (True, "1: from start to archive, CPU, memory and traffic")


def test_figures_of_clusters_have_their_section(runs: dict[str, Path]) -> None:
    figure = Figure("k", "Title", Axis("x"), Axis("y"), (Line("a", (1.0,), (1.0,)),))
    found = section(collect(open_runs(runs, "bsp-1-r1"), more=[figure]), "Clusters")
    assert (found.figures, found.is_folded) == ((figure,), False)


# --- faults and collectives -----------------------------------------------------------------------------------------


def test_runs_with_faults_have_a_row_that_says_where_their_time_went(runs: dict[str, Path]) -> None:
    archives = open_runs(runs, "bsp-1-r1", "bsp-1-r2")
    seconds = {
        "startup": 10.0,
        "useful": 60.0,
        "checkpointing": 5.0,
        "waiting": 5.0,
        "lost": 20.0,
        "detection": 0.0,
        "restart": 0.0,
        "loading": 0.0,
    }
    faults: Any = {
        "seconds": seconds,
        "wall_seconds": 100.0,
        "goodput": 0.6,
        "attempts": 3,
        "injected": 2,
        "checkpoint_seconds": None,
        "checkpoints": 9,
        "timeline": [["useful", 10.0, 70.0]],
        "events": [],
        "script": None,
        "policy": "restart",
        "recoveries": [],
    }
    archives[1].result["faults"] = faults
    found = section(collect(archives), "Faults")
    [rows] = found.tables
    assert rows.head == (
        *("run", "faults", "restarts", "goodput", "E[ETTR]", "recovery", "startup", "useful", "checkpointing"),
        *("waiting", "lost", "detection", "restart", "loading"),
    )
    assert plain(rows.rows) == [
        (
            *("bsp-1-r2", "2", "2", "60 %", "–", "–", "10.0 s", "60.0 s", "5.00 s", "5.00 s", "20.0 s"),
            *("0 s", "0 s", "0 s"),
        )
    ]
    assert rows.numeric == tuple(range(1, 14))
    assert [figure.key for figure in found.figures] == ["faults0"]
    assert "share of the wall time that contributed to the result" in found.paragraphs[0]


def test_runs_without_faults_and_collectives_have_no_section_of_them(report: Report) -> None:
    headings = {each.heading for each in report.sections}
    assert not {"Faults", "Collectives by message size", "Clusters"} & headings


def test_the_page_explains_itself_at_its_end(runs: dict[str, Path], report: Report) -> None:
    last = report.sections[-1]
    assert (last.heading, last.is_folded) == ("How to read this page", True)
    assert last.paragraphs[0].startswith("Runs share a figure only if")
    two = collect(open_runs(runs, "bsp-1-r1", "bsp-other")).sections[-1]
    assert two.paragraphs[0].startswith("2 jobs differ, so they are not drawn together. Runs share a figure only if")


@pytest.mark.parametrize(
    ("task", "goal", "is_noted"),
    [("cifar10_resnet20", True, True), ("cifar10_resnet20", False, False), ("mine", True, False)],
)
def test_published_figures_are_named_where_there_are_some(
    runs: dict[str, Path], task: str, goal: bool, is_noted: bool
) -> None:
    [archive] = copies(runs, 1)
    archive.run["spec"]["task"] = archive.result["task"] = task
    if not goal:
        archive.result["goal"] = None
    paragraphs = [text for each in collect([archive]).sections for text in each.paragraphs if "are dashed" in text]
    assert len(paragraphs) == is_noted
    if is_noted:
        assert paragraphs[0].startswith("Published figures of the original MLBench are dashed (")
        assert paragraphs[0].endswith(" Loss over time and learning rate: the original did not publish numbers.")


def test_two_sizes_are_all_sizes_and_a_setting(runs: dict[str, Path]) -> None:
    found = collect(open_runs(runs, "bsp-1-r1", "bsp-2-r1"))
    assert len(table(found, "All sizes").rows) == 2
    assert cells(table(found, "Settings")) == {"workers": "1, 2"}
    assert {each.heading for each in collect(open_runs(runs, "bsp-2-r1", "topk-2-r1")).sections} >= {"Results"}


@pytest.mark.parametrize(
    ("samples", "summary"),
    [
        (None, "3: communication share, loss over time, spread over ranks"),
        (51200, "4: communication share, throughput, loss over time …"),
    ],
)
def test_three_folded_figures_are_named_and_more_are_not(
    runs: dict[str, Path], samples: int | None, summary: str
) -> None:
    archives = open_runs(runs, "bsp-2-r1", "topk-2-r1")
    for archive in archives:
        archive.result["samples"] = samples
    assert section(collect(archives), "More figures").summary == summary
