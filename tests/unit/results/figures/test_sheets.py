"""What is written on the sheets of `mlbench charts`: titles, subtitles, footnotes, warnings and messages."""

from typing import Any

import pytest

from mlbench_cli.results.analysis.series import Measurement, group_runs
from mlbench_cli.results.archive.conditions import Condition, Conditions
from mlbench_cli.results.figures.charts import list_sheets
from mlbench_cli.results.figures.model import Sheet
from tests.unit.results.figures.test_scaling import run

BUDGET = {"outcome": "budget_spent", "budget": "60", "value": 75.0}


def sheets(*runs: Measurement) -> dict[str, Sheet]:
    return {sheet.name: sheet for sheet in list_sheets(group_runs(runs))}


def plain(text: str) -> str:
    return text.replace("\u00a0", " ")


def test_runs_to_a_goal_have_three_sheets(measured: Measurement) -> None:
    found = sheets(run(measured, "a", 1, 100.0), run(measured, "b", 2, 60.0))
    assert [(sheet.name, sheet.title, len(sheet.figures)) for sheet in found.values()] == [
        ("total_time", "Total time to the goal", 1),
        ("speedup", "Speed-up", 1),
        ("time_for_all_phases", "Time for all phases", 1),
    ]
    assert {sheet.subtitle for sheet in found.values()} == {
        "unknown-task · gloo · cpu · preset spec · goal Prec@1 >= 80 · 1 CPU per rank"
    }
    assert {sheet.footnote for sheet in found.values()} == {
        "Seconds count from the first training step to the goal or the end, validation included."
    }
    assert {sheet.marks for sheet in found.values()} == {()}


@pytest.mark.parametrize(
    ("facts", "title"),
    [
        ([{}, {}], "Total time to the goal"),
        ([{}, {"goal": "", "metric": ""}], "Total time"),
        ([{}, BUDGET], "Total time"),
        ([{"goal": "", "metric": ""}], "Total time"),
    ],
)
def test_a_time_is_to_the_goal_only_where_all_runs_had_one(
    measured: Measurement, facts: list[dict[str, Any]], title: str
) -> None:
    found = sheets(*(run(measured, str(number), 1, 100.0, **each) for number, each in enumerate(facts)))
    assert found["total_time"].title == title


def test_single_values_are_a_message(measured: Measurement) -> None:
    found = sheets(
        run(measured, "a", 1, 100.0),
        run(measured, "b", 4, 50.0, task="other"),
        run(measured, "c", 2, 50.0, task="third", outcome="failed"),
    )
    assert found["total_time"].figures == ()
    assert plain(found["total_time"].message).splitlines() == [
        "other: 50.0 s with 4 workers",
        "third: no run succeeded with 2 workers",
        "unknown-task: 100 s with 1 worker",
    ]
    assert found["speedup"].message.splitlines() == [
        *("A speed-up needs successful runs with two numbers of workers:", "", "mlbench run NAME 1 2 4 --task TASK"),
    ]
    parts: dict[str, float] = {}
    assert sheets(run(measured, "a", 1, 100.0, parts=parts))["time_for_all_phases"].message == (
        "No run reported its phases."
    )


def test_runs_with_a_budget_have_a_sheet_of_what_they_reached(measured: Measurement) -> None:
    found = sheets(run(measured, "a", 1, 60.0, **BUDGET))
    assert found["accuracy_after_time"].title == "Accuracy after 60 s"
    assert plain(found["accuracy_after_time"].message) == "unknown-task: Prec@1 75.0 % with 1 worker"
    assert found["speedup"].message == "Runs with a time budget have no speed-up;\nsee accuracy_after_time instead."
    both = sheets(run(measured, "a", 1, 60.0, **BUDGET), run(measured, "b", 1, 60.0, **{**BUDGET, "budget": "90"}))
    assert both["accuracy_after_time"].title == "Accuracy after time"
    mixed = sheets(run(measured, "a", 2, 60.0, **BUDGET), run(measured, "b", 1, 60.0))
    assert mixed["speedup"].message.startswith("A speed-up needs")
    assert plain(mixed["accuracy_after_time"].message) == (
        "unknown-task (spec, Prec@1 >= 80, 60): Prec@1 75.0 % with 2 workers"
    )
    failed = sheets(run(measured, "a", 2, 60.0, **BUDGET), run(measured, "b", 4, 60.0, budget="60", outcome="failed"))
    assert len(failed["accuracy_after_time"].message.splitlines()) == 1


@pytest.mark.parametrize(
    ("facts", "marks"),
    [
        ([{"synthetic": "synthetic data"}], ("SYNTHETIC DATA",)),
        ([{"synthetic": "synthetic data"}, {}], ("PARTLY SYNTHETIC DATA",)),
        ([{"label": "functional only"}], ("FUNCTIONAL ONLY",)),
        (
            [{"label": "functional only", "synthetic": "synthetic data"}, {"label": "functional only"}],
            ("PARTLY SYNTHETIC DATA", "FUNCTIONAL ONLY"),
        ),
    ],
)
def test_sheets_are_marked_with_what_they_must_not_be_taken_for(
    measured: Measurement, facts: list[dict[str, Any]], marks: tuple[str, ...]
) -> None:
    found = sheets(*(run(measured, str(number), 1, 100.0, **each) for number, each in enumerate(facts)))
    assert {sheet.marks for sheet in found.values()} == {marks}


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"processes_per_worker": 2}, "2 processes per worker"),
        ({"gpus_per_worker": 1}, "1 GPU per worker"),
        ({"label": "functional only"}, "functional only"),
    ],
)
def test_a_subtitle_names_what_is_not_usual(measured: Measurement, facts: dict[str, Any], words: str) -> None:
    common = sheets(run(measured, "a", 1, 100.0, **facts))["total_time"].subtitle
    assert words in common.split(" · ")
    apart = sheets(run(measured, "a", 1, 100.0, **facts), run(measured, "b", 1, 100.0))["total_time"].subtitle
    assert words not in apart


def test_an_unknown_number_of_cpus_is_not_in_the_subtitle(measured: Measurement) -> None:
    assert "CPU" not in sheets(run(measured, "a", 1, 100.0, cpus=None))["total_time"].subtitle


def test_a_footnote_explains_repeats_and_whole_runs(measured: Measurement) -> None:
    repeats = sheets(run(measured, "a", 1, 100.0), run(measured, "b", 1, 101.0))["total_time"].footnote
    assert repeats == (
        "Seconds count from the first training step to the goal or the end, validation included. Means of repeats. "
        "Capped bars: 95 % intervals (Student's t); pale bars: ranges of two runs."
    )
    whole = run(measured, "a", 1, 100.0, measure="whole run")
    assert sheets(whole)["total_time"].footnote == (
        "Runs that report no result are shown with the seconds of the whole run."
    )
    both = sheets(whole, run(measured, "b", 1, 100.0))["total_time"].footnote
    assert both.startswith("Seconds count")
    assert both.endswith("of the whole run.")


def test_a_footnote_names_excluded_runs_with_their_end(measured: Measurement) -> None:
    runs = [run(measured, "good", 1, 100.0)]
    for outcome in ("goal_missed", "never_started", "failed"):
        runs.append(run(measured, outcome.replace("_", "-"), 1, 100.0, outcome=outcome))
    assert sheets(*runs)["total_time"].footnote.endswith(
        "Excluded: failed (failed), goal-missed (goal missed), never-started (never started)."
    )
    many = [run(measured, f"f{number}", 1, 100.0, outcome="failed") for number in range(9)]
    assert sheets(*many)["total_time"].footnote.endswith("f7 (failed) and 1 more.")


def test_a_footnote_names_runs_under_other_conditions(measured: Measurement) -> None:
    shared = Conditions(shared=Condition("shared", "with another run"))
    runs = [run(measured, f"r{number}", 1, 100.0, conditions=shared) for number in range(7)]
    note = sheets(*runs, run(measured, "calm", 1, 100.0))["total_time"].footnote
    assert "Measured under other conditions: r0 (" in note
    assert "with another run" in note
    assert note.endswith(" and 1 more.")
    assert "calm" not in note


def test_published_results_are_not_on_the_sheets(measured: Measurement) -> None:
    runs = [run(measured, str(workers), workers, 100.0 / workers, task="cifar10_resnet20") for workers in (1, 2)]
    for sheet in sheets(*runs).values():
        assert not [line.label for figure in sheet.figures for line in figure.lines if "published" in line.label]
