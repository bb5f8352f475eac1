"""The title, sentences, numbers and badges of a report: each by hand from a few measurements."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.model.methods import OWN
from mlbench_cli.results.analysis.fabric import FabricReport, LinkFault
from mlbench_cli.results.analysis.fabric import Job as FabricJob
from mlbench_cli.results.analysis.series import Measurement, group_runs
from mlbench_cli.results.analysis.statistics import Estimate
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.results.figures.curves import RunData
from mlbench_cli.results.figures.scaling import Job, split_jobs
from mlbench_cli.results.report.fabric import fabric_tables, make_fabric_page
from mlbench_cli.results.report.summary import (
    Verdict,
    badges_of,
    best_of,
    judge,
    numbers_of,
    places_of,
    sentences_of,
    title_of,
)


def job_of(measured: Measurement, *runs: dict[str, Any]) -> Job:
    """A job of runs; `seconds`, `workers` and the like replace those of the measurement, others facts of its key."""
    made = []
    for number, changes in enumerate(runs):
        own = {key: changes[key] for key in changes if hasattr(measured, key)}
        facts = {key: value for key, value in changes.items() if key not in own}
        made.append(
            replace(measured, name=f"r{number}", source=f"r{number}", key=replace(measured.key, **facts), **own)
        )
    [job] = split_jobs(group_runs(made), {}, published=False)
    return job


def repeats(*seconds: float, **changes: Any) -> list[dict[str, Any]]:
    return [{"seconds": each, **changes} for each in seconds]


def verdict_of(job: Job, ratio: Estimate | None) -> Verdict:
    """The second configuration against the first."""
    base, other = places_of(job)[:2]
    return Verdict(base, other, ratio)


def plain(lines: Sequence[str]) -> list[str]:
    return [line.replace("\u00a0", " ") for line in lines]


SLOWER, FASTER, SAME = Estimate(3, 2.0, 1.8, 2.2), Estimate(3, 0.5, 0.4, 0.625), Estimate(3, 1.02, 0.9, 1.1)


# --- title ----------------------------------------------------------------------------------------------------------


def test_the_title_is_the_time_of_the_fastest(measured: Measurement) -> None:
    job = job_of(measured, {"workers": 1}, {"workers": 2, "seconds": 60.0})
    assert plain([title_of(job, None)]) == [
        "unknown-task reaches its goal in 60.0 s with 2 workers (task's own method)"
    ]
    whole = job_of(measured, {"measure": "whole run"})
    assert plain([title_of(whole, None)]) == ["unknown-task takes 100 s with 2 workers (task's own method)"]
    free = job_of(measured, {"metric": ""})
    assert plain([title_of(free, None)]) == ["unknown-task takes 100 s with 2 workers (task's own method)"]


def test_the_title_of_failures_and_of_a_budget(measured: Measurement) -> None:
    failed = job_of(measured, {"outcome": "failed"})
    assert title_of(failed, None) == f"{failed.name}: no run succeeded"
    assert (best_of(failed), list(sentences_of(failed, None)), list(numbers_of(failed, None))) == (None, [], [])
    budget = {"outcome": "budget_spent"}
    job = job_of(measured, {**budget, "value": 70.0}, {**budget, "value": 75.0, "workers": 4})
    assert plain([title_of(job, None)]) == [
        "unknown-task reaches 75.0 % top-1 accuracy with 4 workers (task's own method)"
    ]
    assert plain(list(sentences_of(job, None))) == ["Prec@1 75.0 % with 4 workers (task's own method)."]


@pytest.mark.parametrize(
    ("ratio", "title"),
    [
        (FASTER, "wfbp reaches the goal 2.00× faster than bsp on 2 workers"),
        (SLOWER, "wfbp reaches the goal 2.00× slower than bsp on 2 workers"),
        (SAME, "No difference seen between bsp and wfbp on 2 workers"),
        (Estimate(2, 0.5, 0.4, 0.6), "unknown-task reaches its goal in 90.0 s with 2 workers (wfbp)"),
        (None, "unknown-task reaches its goal in 90.0 s with 2 workers (wfbp)"),
    ],
)
def test_a_comparison_is_the_title_if_there_are_enough_runs(
    measured: Measurement, ratio: Estimate | None, title: str
) -> None:
    job = job_of(measured, {"method": "bsp"}, {"method": "wfbp", "seconds": 90.0})
    assert plain([title_of(job, verdict_of(job, ratio))]) == [title]


def test_the_tasks_own_method_has_an_article(measured: Measurement) -> None:
    job = job_of(measured, {"method": "bsp"}, {"method": OWN, "seconds": 90.0})
    base, own = places_of(job)
    assert title_of(job, Verdict(base, own, FASTER)) == (
        "The task's own method reaches the goal 2.00× faster than bsp on 2 workers"
    )
    assert title_of(job, Verdict(own, base, SLOWER)) == (
        "bsp reaches the goal 2.00× slower than the task's own method on 2 workers"
    )
    assert title_of(job, Verdict(base, own, SAME)) == (
        "No difference seen between bsp and the task's own method on 2 workers"
    )


def test_runs_without_a_goal_are_faster_or_slower_as_runs(measured: Measurement) -> None:
    job = job_of(measured, {"method": "bsp", "metric": ""}, {"method": "wfbp", "metric": ""})
    assert title_of(job, verdict_of(job, FASTER)) == "wfbp runs 2.00× faster than bsp on 2 workers"


def test_the_best_value_after_a_budget_is_the_highest_and_unknown_values_are_the_last(measured: Measurement) -> None:
    budget = {"outcome": "budget_spent"}
    job = job_of(measured, {**budget, "value": None}, {**budget, "value": 0.5, "workers": 4})
    best = best_of(job)
    assert best is not None
    assert best.size == "4 workers"
    unknown = job_of(measured, {**budget, "value": None})
    assert title_of(unknown, None) == "unknown-task reaches – top-1 accuracy with 2 workers (task's own method)"


# --- sentences ------------------------------------------------------------------------------------------------------


def test_a_sentence_has_the_time_and_the_gain_of_more_workers(measured: Measurement) -> None:
    job = job_of(measured, *repeats(90.0, 100.0, 110.0, workers=1), *repeats(50.0, 50.0, 50.0, workers=4))
    assert plain(list(sentences_of(job, None))) == [
        "50.0 s (50.0 to 50.0) with 4 workers (task's own method), 2.00× (1.56 to 2.56) as fast as with 1 worker."
    ]
    slower = job_of(measured, {"workers": 1}, {"workers": 4, "seconds": 150.0})
    assert plain(list(sentences_of(slower, None))) == ["100 s with 1 worker (task's own method)."]


def test_compiling_has_a_sentence(measured: Measurement) -> None:
    job = job_of(measured, {"compiling": 30.0})
    assert plain(list(sentences_of(job, None))) == [
        "100 s with 2 workers (task's own method).",
        "70.0 s of it without compiling.",
    ]


def test_too_few_runs_and_waiting_are_said(measured: Measurement) -> None:
    parts = {"communication": 25.0, "forward": 75.0}
    job = job_of(measured, {"method": "bsp", "parts": parts}, {"method": "wfbp", "parts": {**parts, "forward": 175.0}})
    [_, few] = sentences_of(job, verdict_of(job, None))
    assert few.endswith("apart on 2 workers; at least 3 of each are needed.")
    [_, waits] = plain(list(sentences_of(job, verdict_of(job, FASTER))))
    assert waits.startswith("It waits 12 % of the time for messages; ")
    assert waits.endswith(" waits 25 %.")
    assert len(list(sentences_of(job, verdict_of(job, SAME)))) == 1


def test_a_run_past_its_goal_says_how_its_last_values_compare_with_the_goal(measured: Measurement) -> None:
    race = [{"race": (last, 3.0)} for last in (2.5, 2.6, 2.55)]
    job = job_of(measured, *race)
    [_, sentence] = plain(list(sentences_of(job, None)))
    assert sentence[0].isupper()
    assert sentence.endswith(".")
    assert "3" in sentence
    assert len(list(sentences_of(job_of(measured, *race[:2], {"race": None}), None))) == 1


def test_waiting_is_said_only_where_both_sides_have_measured_their_parts(measured: Measurement) -> None:
    job = job_of(measured, {"method": "bsp", "parts": {}}, {"method": "wfbp", "parts": {"communication": 1.0}})
    assert len(list(sentences_of(job, verdict_of(job, FASTER)))) == 1


# --- verdict --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "known", "different"),
    [
        (FASTER, True, True),
        (SAME, True, False),
        (Estimate(3, 1.1, 1.0, 1.2), True, False),
        (Estimate(3, 0.9, 0.8, 1.0), True, False),
        (Estimate(2, 0.5, 0.4, 0.6), False, False),
        (None, False, False),
    ],
)
def test_a_difference_needs_an_interval_without_1(
    measured: Measurement, ratio: Estimate | None, known: bool, different: bool
) -> None:
    job = job_of(measured, {"method": "bsp"}, {"method": "wfbp"})
    found = verdict_of(job, ratio)
    assert (found.is_known, found.is_different) == (known, different)


def test_the_baseline_is_a_known_method_at_the_largest_common_size(sealed: Path, measured: Measurement) -> None:
    job = job_of(
        measured,
        {"method": "wfbp", "seconds": 50.0},
        {"method": "bsp", "seconds": 60.0},
        {"method": "dgc", "seconds": 10.0, "workers": 8},
    )
    archive = Archive.open(sealed)
    runs = []
    for number in range(3):
        each = Archive.open(sealed)
        each.run["name"] = f"r{number}"
        each.run["id"] = f"id{number}"
        runs.append(RunData(each))
    found = judge(job, runs)
    assert found is not None
    assert (found.base.group.facts["method"], found.other.group.facts["method"]) == ("bsp", "wfbp")
    assert found.base.size == "2 workers"
    alone = job_of(measured, {"method": "bsp"}, {"method": "wfbp", "workers": 4})
    assert judge(alone, [RunData(archive)]) is None
    assert judge(job_of(measured, {}), [RunData(archive)]) is None


@pytest.mark.parametrize(
    ("methods", "base", "other"),
    [
        (("wfbp", "ddp", "bsp", OWN), OWN, "wfbp"),
        (("wfbp", "ddp", "bsp"), "bsp", "wfbp"),
        (("wfbp", "ddp", "dgc"), "ddp", "wfbp"),
        (("bsp", "wfbp", "dgc"), "bsp", "wfbp"),
        (("wfbp", "dgc", "topk"), "topk", "wfbp"),  # of unknown ones the slowest
    ],
)
def test_the_fastest_is_compared_with_the_best_known_baseline(
    sealed: Path, measured: Measurement, methods: tuple[str, ...], base: str, other: str
) -> None:
    """The first method is the fastest, and the last one the slowest."""
    job = job_of(measured, *({"method": method, "seconds": 50.0 + n} for n, method in enumerate(methods)))
    runs = [run(sealed, f"r{number}") for number in range(len(methods))]
    for each in runs:
        each.archive.run["id"] = each.name
    found = judge(job, runs)
    assert found is not None
    assert (found.base.group.facts["method"], found.other.group.facts["method"]) == (base, other)


def test_runs_with_a_budget_have_no_verdict_on_their_times(sealed: Path, measured: Measurement) -> None:
    budget = {"outcome": "budget_spent"}
    job = job_of(measured, {**budget, "method": "bsp"}, {**budget, "method": "wfbp"})
    assert judge(job, [run(sealed, "r0"), run(sealed, "r1")]) is None


# --- numbers --------------------------------------------------------------------------------------------------------


def test_numbers_are_time_speed_up_efficiency_and_throughput(measured: Measurement) -> None:
    job = job_of(
        measured,
        *repeats(90.0, 100.0, 110.0, workers=1, throughput=5.0),
        *repeats(50.0, 50.0, 50.0, workers=4, throughput=10.0),
    )
    found = [(each.name, *plain([each.value, *each.notes])) for each in numbers_of(job, None)]
    assert found == [
        ("Time to goal", "50.0 s", "50.0 to 50.0 · n = 3", "4 workers (task's own method)"),
        ("Speed-up over 1 worker", "2.00×", "1.56 to 2.56", "4× is ideal"),
        ("Efficiency", "50 %", "speed-up over growth in workers"),
        ("Throughput", "10.0 samples/s", "10.0 to 10.0 · n = 3", "of all ranks"),
    ]


def test_one_run_is_named_as_such(measured: Measurement) -> None:
    job = job_of(measured, {"throughput": None, "measure": "whole run"})
    assert [(each.name, *plain([each.value, *each.notes])) for each in numbers_of(job, None)] == [
        ("Time", "100 s", "one run", "2 workers (task's own method)")
    ]


def test_a_comparison_takes_the_place_of_the_throughput(measured: Measurement) -> None:
    job = job_of(measured, {"method": "bsp"}, {"method": "wfbp"})
    last = list(numbers_of(job, verdict_of(job, FASTER)))[-1]
    assert (last.value, last.notes[0]) == ("2.00× faster", "1.60 to 2.50")
    assert last.name.startswith("Against ")
    few = list(numbers_of(job, verdict_of(job, Estimate(1, 0.5))))[-1]
    assert (few.value, few.notes[0]) == ("2.00× faster", "too few runs")


def test_a_value_after_a_budget_is_the_only_number_beside_the_throughput(measured: Measurement) -> None:
    budget = {"outcome": "budget_spent", "throughput": None}
    job = job_of(measured, *({**budget, "value": value} for value in (70.0, 72.0, 74.0)))
    [found] = numbers_of(job, None)
    assert [found.name, *plain([found.value, *found.notes])] == [
        *("Top-1 accuracy", "72.0 %", "67.0 to 77.0 · n = 3", "2 workers (task's own method)"),
    ]


def test_a_verdict_without_a_difference_has_its_interval_as_a_note(measured: Measurement) -> None:
    job = job_of(measured, {"method": "bsp"}, {"method": "wfbp"})
    last = list(numbers_of(job, verdict_of(job, SAME)))[-1]
    assert (last.name, last.value, last.notes) == (
        *("Against bsp", "no difference seen"),
        ("0.900 to 1.10×", "wfbp, 2 workers"),
    )


def test_the_fewest_workers_have_no_speed_up_of_their_own(measured: Measurement) -> None:
    job = job_of(measured, {"workers": 1, "seconds": 10.0}, {"workers": 4, "seconds": 20.0})
    assert [each.name for each in numbers_of(job, None)] == ["Time to goal", "Throughput"]


# --- badges ---------------------------------------------------------------------------------------------------------


def run(sealed: Path, name: str = "r", not_derived: tuple[str, ...] = (), **result: Any) -> RunData:
    found = Archive.open(sealed, not_derived=not_derived)
    found.run["name"] = name
    found.run["spec"]["network"] = result.pop("network", None)
    found.result.update(result)  # type: ignore[typeddict-item]
    return RunData(found)


def badges(runs: list[RunData], names: dict[str, str] | None = None) -> list[tuple[str, str]]:
    return [(badge.text, str(badge.tone)) for badge in badges_of(runs, names or {})]


def test_badges_of_one_and_of_several_runs(sealed: Path) -> None:
    assert badges([run(sealed)]) == [("1 archive verified", "good"), ("no division", "")]
    assert badges([run(sealed), run(sealed)])[0] == ("2 of 2 archives verified", "good")
    assert badges([run(sealed), run(sealed, not_derived=("x",))])[0] == ("1 of 2 archives not proven", "bad")


def test_badges_warn_first_and_then_of_failures(sealed: Path) -> None:
    shared: dict[str, Any] = {
        "measured": True,
        "labels": ["shared"],
        "crowded": None,
        "contended": None,
        "quota_limited": None,
    }
    odd: dict[str, Any] = {
        "label": {"word": "functional", "reason": "x"},
        "synthetic": True,
        "outcome": "never_started",
    }
    runs = [
        run(sealed, **odd, conditions={**shared, "shared": {"reason": "x", "figures": {}}}),
        run(sealed, outcome="goal_missed", synthetic=True),
        run(sealed, network="1gbit"),
    ]
    assert badges(runs)[2:] == [
        ("network 1gbit", ""),
        ("1 of 3 functional only", "warn"),
        ("2 of 3 synthetic data", "warn"),
        ("1 of 3 shared", "warn"),
        ("1 of 3 missed the goal", "warn"),
        ("1 of 3 never started", "bad"),
    ]
    assert ("2 networks", "") in badges([run(sealed, network="1gbit"), run(sealed, network="10gbit")])
    assert ("missed the goal", "warn") in badges([run(sealed, outcome="goal_missed")])


def test_divisions_are_named_by_their_methods(sealed: Path) -> None:
    def texts(*words: str | None) -> list[str]:
        runs = [run(sealed, f"r{n}", division={"word": word, "reason": None}) for n, word in enumerate(words)]
        names = {f"r{n}": f"m{n}" for n in range(9)}
        return [text for text, _ in badges(runs, names)][1:]

    assert texts("closed", "closed") == ["closed division"]
    assert texts("closed", None, "closed") == ["m0, m2: closed division", "m1: no division"]
    assert texts("open", "open", "open", "closed") == ["m3: closed division", "some: open division"]


# --- the fabric's page ----------------------------------------------------------------------------------------------

FABRIC_JOB = FabricJob(
    *("r", "bsp", 2, 400, 0.15, 1e6, 1e8, "given"),
    compute_seconds=0.1,
    roofline_seconds=0.2,
    jct_ratio=0.75,
    overlap=0.5,
)
ROW = {"run": "c", "collective": "all_reduce", "dtype": "fp32", "bytes": 8, "samples": 50}
RATES = {"busbw_at_mean_time": 16.0, "busbw_at_p50_time": 20.0, "busbw_at_p95_time": 10.0, "busbw_at_p99_time": None}
REPORT = FabricReport(
    (FABRIC_JOB,), ({**ROW, **RATES},), (LinkFault("r", 1, 32.0, 12.0, 13.5, None),), 0.95, ("h",), ()
)


def test_tables_of_a_fabric() -> None:
    found = {table.title: ([*plain(table.rows[0])], table.numeric) for table in fabric_tables(REPORT)}
    assert found == {
        "Trainings": (
            ["r", "bsp", "2", "150 ms", "100 ms", "200 ms", "0.750", "50 %", "–", "–"],
            (2, 3, 4, 5, 6, 7, 8, 9),
        ),
        "Links that were changed": (["r", "1", "32.0 s", "12.0 s", "13.5 s", "–"], (1, 2, 3, 4, 5)),
        "Collectives": (
            ["c", "all_reduce", "fp32", "8", "50", "16.0", "20.0", "10.0", "–"],
            (3, 4, 5, 6, 7, 8),
        ),
    }
    assert fabric_tables(replace(REPORT, jobs=(), collectives=(), links=())) == []


def test_the_page_of_a_fabric_has_the_ten_sections_of_the_draft() -> None:
    page = make_fabric_page(REPORT)
    assert [section.heading for section in page.sections] == [
        *("1. Device under test", "2. Topology", "3. Configuration", "4. Observation points", "5. Hosts"),
        *("6. Results", "7. Anomalies", "8. Trials", "9. Repeatability", "10. Comparability"),
    ]
    texts = {section.heading.partition(". ")[2]: section.paragraphs for section in page.sections}
    assert texts["Results"] == ("Fairness (Jain's index): 0.950.",)
    assert texts["Configuration"] == ("bsp, 2 ranks, access rate given",)
    assert texts["Anomalies"] == ("None.",)
    assert texts["Trials"] == ("2 counted, 0 left out.",)
    assert [len(section.tables) for section in page.sections] == [0, 0, 0, 0, 0, 3, 0, 0, 0, 0]
    assert page.runs == ("c", "r")
    empty = make_fabric_page(FabricReport((), (), (), None, (), ("x: why",)))
    texts = {section.heading.partition(". ")[2]: section.paragraphs for section in empty.sections}
    assert (texts["Results"], texts["Configuration"], texts["Anomalies"]) == ((), ("See the results.",), ("x: why",))
