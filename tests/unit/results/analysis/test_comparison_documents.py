"""A comparison and its gate as whole documents, by hand."""

import math
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.results.analysis.cells import Values, describe_cell, make_document, pair_cells
from mlbench_cli.results.analysis.compare import THROUGHPUT, Comparison, ComparisonRow, Obstacle, compare
from mlbench_cli.results.analysis.gate import (
    Direction,
    GateResult,
    check_gate,
    describe_limit,
    find_metric,
    parse_limit,
)
from mlbench_cli.results.analysis.sessions import Sessions
from mlbench_cli.results.analysis.statistics import Estimate
from mlbench_cli.results.analysis.verdict import Verdict
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.util.times import timestamp
from tests.unit.results.runs import START


def archive(path: Path, run: str, seconds: float = 100.0, at: float = 0.0, **result: Any) -> Archive:
    """A run of so many seconds that started so long after the first; the wall time is 3 s longer."""
    found = Archive.open(path)
    found.run["id"] = found.run["name"] = run
    fields = {
        "run": run,
        "started": timestamp(START + at),
        "wall_seconds": seconds + 3,
        "timings": {},
        "task_seconds": {"wall": seconds, "training": 0.9 * seconds},
    }
    found.result.update({**fields, **result})  # type: ignore[typeddict-item]
    return found


ALONE = {"count": 1, "low": None, "high": None, "confidence": 0.95}


def test_a_comparison_of_two_runs_as_a_document(sealed: Path) -> None:
    a, b = archive(sealed, "a"), archive(sealed, "b", 50.0, at=200.0)
    b.run["spec"]["backend"] = "mpi"
    document = compare([a], [b]).to_dict()
    estimates = document.pop("estimates")
    assert document == {
        "schema_version": 1,
        "a": "a",
        "b": "b",
        "differences": {"backend": ["gloo", "mpi"]},
        "obstacles": ["The backends differ: gloo and mpi."],
        "obstacle_words": ["backend"],
        "across": [],
        "verdict": "Too few runs for a verdict on a and b: 1 and 1 runs; each side needs at least 3.",
        "runs": [1, 1],
        "sessions": {
            "a": 1,
            "b": 1,
            "shared": 1,
            "basis": "within",
            "in_blocks": False,
            "note": "one session: the interval has no session spread",
        },
        "conditions": {},
        "energy_sources": [],
        "seconds": {"run": [103.0, 53.0], "task": [100.0, 50.0], "training": [90.0, 45.0]},
        "ratios": {"run": 53 / 103, "task": 0.5, "training": 0.5},
    }
    assert estimates["task"] == {
        "a": {**ALONE, "mean": 100.0},
        "b": {**ALONE, "mean": 50.0},
        "ratio": {**ALONE, "mean": 0.5},
        "higher_is_better": False,
    }
    assert {name: row["higher_is_better"] for name, row in estimates.items()} == {
        **dict.fromkeys(("run", "task", "training"), False),
        "Prec@1": True,
        THROUGHPUT: True,
    }
    assert estimates[THROUGHPUT]["ratio"]["mean"] == pytest.approx(2.0)


def test_a_figure_that_one_run_of_a_side_lacks_has_no_mean(sealed: Path) -> None:
    a = [archive(sealed, "a"), archive(sealed, "b", samples=None)]
    found = compare(a, [archive(sealed, "c")])
    row = found.others[THROUGHPUT]
    assert (row.a, row.b is None, row.ratio) == (None, False, None)
    assert found.rows.keys() == {*found.seconds, *found.others}


def test_a_goal_below_is_better_when_it_is_low(sealed: Path) -> None:
    goal: dict[str, Any] = {**(Archive.open(sealed).result["goal"] or {}), "comparison": "<=", "metric": "loss"}
    found = compare([archive(sealed, "a", goal=goal)], [archive(sealed, "b", goal=goal)])
    assert found.others["loss"].higher_is_better is False


def test_the_run_decides_where_the_task_has_no_time(sealed: Path) -> None:
    silent = {"task_seconds": {"wall": None, "training": None}}
    a = [archive(sealed, f"a{n}", 97.0 + n, 200.0 * n, **silent) for n in range(3)]
    b = [archive(sealed, f"b{n}", 197.0 + n, 200.0 * n + 100, **silent) for n in range(3)]
    found = compare(a, b, ("old", "new"))
    assert str(found.verdict).startswith("new is 1.99× slower than old (95 %: ")
    assert compare(a, [archive(sealed, "x")]).failed == ()
    failed = [archive(sealed, "y", outcome="failed"), archive(sealed, "z", outcome="goal_missed")]
    assert compare(a, failed).failed == ("y", "z")


def test_paired_sessions_have_one_ratio_each(sealed: Path) -> None:
    """Three days that differ by factors; the new code takes 1.1, 1.2 and 1.3 times as long."""
    levels = (100.0, 200.0, 50.0)
    a = [archive(sealed, f"a{n}", level, 86400.0 * n) for n, level in enumerate(levels)]
    b = [archive(sealed, f"b{n}", level * (1.1 + 0.1 * n), 86400.0 * n + 600) for n, level in enumerate(levels)]
    row = compare(a, b).seconds["task"]
    assert row.ratio is not None
    logs = [math.log(1.1), math.log(1.2), math.log(1.3)]
    mean = sum(logs) / 3
    error = math.sqrt(sum((each - mean) ** 2 for each in logs) / 2 / 3)
    assert row.ratio.mean == pytest.approx(math.exp(mean))
    assert row.ratio.high == pytest.approx(math.exp(mean + 4.30265 * error), rel=1e-4)  # t(0.975, 2)
    assert row.ratio.low == pytest.approx(math.exp(mean - 4.30265 * error), rel=1e-4)


def test_a_notebook_shows_figures_and_warnings(sealed: Path) -> None:
    a, b = archive(sealed, "<a>"), archive(sealed, "b", 50.0, timings={})
    b.run["spec"]["backend"] = "<mpi>"
    html = compare([a], [b])._repr_html_()
    assert html.startswith("<p>⚠ The backends differ: gloo and &lt;mpi&gt;.</p><table>")
    assert "<th>figure</th><th>&lt;a&gt;</th><th>b</th><th>B / A</th>" in html
    assert "<td>task</td><td>100</td><td>50.0</td><td>0.500</td>" in html


def test_settings_that_may_differ_between_any_runs_are_no_difference(sealed: Path) -> None:
    a, b = archive(sealed, "a"), archive(sealed, "b")
    b.run["spec"].update({"name": "x", "price": {"per_hour": 1.0}, "spec_version": 9})
    b.run["spec"]["parameters"] = {**b.run["spec"]["parameters"], "batch_size": 64, "new": 1}
    b.run["spec"]["kubernetes"] = {"queue": "q"}
    found = compare([a], [b]).differences
    assert found["parameters.batch_size"] == (128, 64)
    assert found["parameters.new"] == (None, 1)
    assert found["kubernetes.queue"][1] == "q"
    assert not {"name", "price", "spec_version", "parameters", "kubernetes"} & set(found)


def test_what_the_judge_found_is_a_difference_too(sealed: Path) -> None:
    division = {"word": "open", "reason": "x"}
    changes: dict[str, Any] = {"synthetic": True, "data": "x", "division": division, "outcome": "goal_missed"}
    a, b = archive(sealed, "a"), archive(sealed, "b", **changes)
    b.run["mlbench"] = "0"
    assert compare([a], [b]).differences == {
        "data": ("digits", "x"),
        "synthetic": (False, True),
        "division": (None, "open"),
        "outcome": ("goal_reached", "goal_missed"),
        "mlbench": (a.run["mlbench"], "0"),
    }


# --- gate -----------------------------------------------------------------------------------------------------------


def comparison(ratio: Estimate | None, **changes: Any) -> Comparison:
    row = ComparisonRow(Estimate(3, 1.0), Estimate(3, 1.0), ratio)
    rates = {"rate": ComparisonRow(row.a, row.b, ratio, True), "odd": ComparisonRow(row.a, row.b, ratio, None)}
    fields: dict[str, Any] = {"differences": {}, "obstacles": (), "seconds": {"task": row}, "others": rates}
    return Comparison(**{"a": "old", "b": "new", **fields, **changes})


@pytest.mark.parametrize(
    ("ratio", "limit", "verdict"),
    [
        (Estimate(3, 1.3, 1.2, 1.4), 1.2, Verdict.CANNOT_TELL),
        (Estimate(3, 1.3, 1.201, 1.4), 1.2, Verdict.FAILED),
        (Estimate(3, 1.1, 1.0, 1.2), 1.2, Verdict.PASSED),
        (Estimate(3, 1.1, 1.0, 1.201), 1.2, Verdict.CANNOT_TELL),
        (Estimate(1, 9.0), 1.2, Verdict.CANNOT_TELL),
        (None, 1.2, Verdict.CANNOT_TELL),
    ],
)
def test_the_whole_interval_has_to_be_on_one_side_of_the_limit(
    ratio: Estimate | None, limit: float, verdict: Verdict
) -> None:
    assert check_gate(comparison(ratio), limit).verdict is verdict


def test_a_gate_as_a_document() -> None:
    assert check_gate(comparison(Estimate(3, 2.0, 1.6, 2.5)), 1.2).to_dict() == {
        "verdict": "failed",
        "reason": "task: new against old: 2.00× slower (1.60 to 2.50); limit 1.2× (+20 %).",
        "metric": "task",
        "direction": "lower",
        "limit": 1.2,
        "worse": {"count": 3, "mean": 2.0, "low": 1.6, "high": 2.5, "confidence": 0.95},
    }
    empty = GateResult(Verdict.CANNOT_TELL, "x", None, None, 1.0).to_dict()
    assert (empty["metric"], empty["direction"], empty["worse"]) == (None, None, None)


def test_a_rate_is_worse_when_it_falls() -> None:
    """Half the rate is twice as bad."""
    found = check_gate(comparison(Estimate(3, 0.5, 0.4, 0.625)), 1.2, "rate")
    assert (found.verdict, found.direction) == (Verdict.FAILED, Direction.HIGHER)
    assert found.worse is not None
    assert [found.worse.mean, found.worse.low, found.worse.high] == pytest.approx([2.0, 1.6, 2.5])
    turned = check_gate(comparison(Estimate(3, 0.5, 0.4, 0.625)), 1.2, "rate", Direction.LOWER)
    assert turned.verdict is Verdict.PASSED
    with pytest.raises(UsageError, match='unknown whether lower or higher is better for "odd"'):
        check_gate(comparison(Estimate(3, 0.5, 0.4, 0.6)), 1.2, "odd")
    assert check_gate(comparison(Estimate(3, 0.5, 0.4, 0.6)), 1.2, "odd", Direction.LOWER).verdict is Verdict.PASSED


def test_what_forbids_a_verdict_comes_before_the_figures() -> None:
    good = Estimate(3, 1.0, 0.9, 1.1)
    failed = check_gate(comparison(good, failed=("x", "y"), obstacles=(Obstacle("", "No."),)), 1.2)
    assert (failed.verdict, failed.reason) == (Verdict.FAILED, "x, y did not succeed.")
    stopped = check_gate(comparison(good, obstacles=(Obstacle("", "No."), Obstacle("", "Nor this."))), 1.2)
    assert (stopped.verdict, stopped.reason) == (Verdict.CANNOT_TELL, "new cannot be compared with old. No.")
    apart = check_gate(comparison(good, sessions=Sessions((1, 1), (2, 2))), 1.2)
    assert apart.verdict is Verdict.CANNOT_TELL
    assert apart.reason.startswith("The sides were measured in different sessions")
    blocks = check_gate(comparison(good, sessions=Sessions((1, 1), (1, 1), True)), 1.2)
    assert "; one session: the interval has no session spread; the sides did not alternate." in blocks.reason
    assert check_gate(comparison(None), 1.2).reason == "Not both sides have task above 0."


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        (None, "task"),
        ("seconds", "task"),
        ("throughput", THROUGHPUT),
        ("Throughput", THROUGHPUT),
        ("bandwidth", "all_reduce fp32, best busbw GB/s"),
        ("prec", "Prec@1"),
        ("forward", "forward"),
    ],
)
def test_a_metric_is_found_by_its_name_or_a_part_of_it(asked: str | None, name: str) -> None:
    row = ComparisonRow(None, None, Estimate(1, 1.0))
    names = ("run", "task", "forward", "Prec@1", THROUGHPUT, "all_reduce fp32, best busbw GB/s")
    assert find_metric(dict.fromkeys(names, row), asked) == name


def test_a_metric_that_is_not_there_or_not_unique_is_refused() -> None:
    rows = dict.fromkeys(("run", "task", "forward", "backward"), ComparisonRow(None, None, None))
    with pytest.raises(UsageError, match='--metric "ward" names 2 figures') as caught:
        find_metric(rows, "ward")
    assert caught.value.hint == "One of: forward, backward."
    with pytest.raises(UsageError, match='--metric "forwad" is not a figure of these results') as caught:
        find_metric(rows, "forwad")
    assert "forward" in caught.value.message
    assert caught.value.hint == "One of: run, task, forward, backward."
    assert find_metric(rows, None) == "task"  # without a ratio the first that there is
    assert find_metric({**rows, "run": ComparisonRow(None, None, Estimate(1, 1.0))}, None) == "run"
    assert find_metric({}, None) is None


@pytest.mark.parametrize(("text", "factor"), [("1.2", 1.2), ("+20%", 1.2), ("20%", 1.2), ("-10%", 0.9), ("+1.5", 1.5)])
def test_a_limit_is_a_factor_or_a_percentage(text: str, factor: float) -> None:
    assert parse_limit(text, "--x") == pytest.approx(factor)


@pytest.mark.parametrize("text", ["0", "-1", "1000000", "x", "", "%", "-100%", "nan"])
def test_any_other_limit_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=f'--x "{text}" is neither a factor nor a percentage'):
        parse_limit(text, "--x")


@pytest.mark.parametrize(
    ("limit", "words"),
    [(1.2, "limit 1.2× (+20 %)"), (1.0, "limit 1× (+0 %)"), (0.9, "limit 0.9× (-10 %)")],
)
def test_a_limit_in_words(limit: float, words: str) -> None:
    assert describe_limit(limit) == words


# --- cells ----------------------------------------------------------------------------------------------------------


def test_documents_of_several_cells_have_the_worst_verdict() -> None:
    passed, failed = (GateResult(each, "x", "task", Direction.LOWER, 1.2) for each in (Verdict.PASSED, Verdict.FAILED))
    one: Values = (("workers", "1"),)
    two: Values = (("workers", "2"),)
    found = {one: comparison(Estimate(1, 1.0)), two: comparison(Estimate(1, 1.0))}
    document = make_document(found, {one: passed, two: failed}, ["4 workers (A only)"])
    assert [(each["cell"], each["gate"]["verdict"]) for each in document["comparisons"]] == [
        *(({"workers": "1"}, "passed"), ({"workers": "2"}, "failed")),
    ]
    assert (document["schema_version"], document["left_out"], document["verdict"]) == (
        1,
        ["4 workers (A only)"],
        "failed",
    )
    assert make_document(found, {}, [])["verdict"] is None
    assert make_document(found, {one: passed}, [])["comparisons"][1]["gate"] is None
    single = make_document({(): found[one]}, {(): passed}, [])
    assert (single["a"], single["gate"]["verdict"]) == ("old", "passed")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((), ""),
        ((("workers", "1"),), "1 worker"),
        ((("workers", "2"), ("backend", "mpi")), "2 workers, mpi"),
        ((("network", ""), ("parameter rate", "0.5")), "no network, rate=0.5"),
    ],
)
def test_a_cell_in_a_few_words(values: tuple[tuple[str, str], ...], text: str) -> None:
    assert describe_cell(values) == text


@pytest.mark.parametrize(
    ("name", "value", "label"),
    [
        ("task", "x", "x"),
        ("preset", "x", "preset x"),
        ("backend", "mpi", "mpi"),
        ("device", "gpu", "gpu"),
        ("processes_per_worker", 2, "2 processes per worker"),
        ("gpus_per_worker", 2, "2 GPUs per worker"),
        ("network", "1gbit", "1gbit"),
        ("parameters", {"batch_size": 128, "goal_full": 80.0, "goal_light": 70.0, "x": 1}, "x=1"),
        ("later_option", "x", "later_option=x"),
    ],
)
def test_each_axis_of_a_matrix_makes_cells(sealed: Path, name: str, value: object, label: str) -> None:
    other = archive(sealed, "b")
    other.run["spec"][name] = value
    [pair], alone = pair_cells([archive(sealed, "a"), other], [archive(sealed, "c")])
    assert ([each.run["name"] for each in pair.a], alone) == (["a"], [f"{label} (A only)"])


@pytest.mark.parametrize("name", ["seed", "timeout", "cluster", "anonymous"])
def test_runs_that_differ_in_nothing_that_is_varied_on_purpose_are_repeats(sealed: Path, name: str) -> None:
    other = archive(sealed, "b")
    other.run["spec"][name] = 7
    [pair], alone = pair_cells([archive(sealed, "a"), other], [archive(sealed, "c")])
    assert (len(pair.a), pair.values, alone) == (2, (), [])


def test_another_number_of_workers_is_an_obstacle_on_either_side(sealed: Path) -> None:
    small, large = archive(sealed, "a"), archive(sealed, "b", workers=4)
    obstacle = Obstacle("workers", "The numbers of workers differ: 2 and 4.")
    assert compare([small], [large]).obstacles == (obstacle,)
    assert compare([small, large], [archive(sealed, "c")]).obstacles == (obstacle,)
    assert compare([small], [large], across=["workers"]).obstacles == ()


def test_methods_are_compared_by_their_phrases(sealed: Path) -> None:
    a, b = archive(sealed, "a"), archive(sealed, "b")
    b.run["spec"]["method"] = {"name": "topk"}
    assert compare([a], [b]).differences == {"method": ("task's own", "topk")}


def test_two_versions_of_a_run_on_both_sides_are_refused(sealed: Path) -> None:
    with pytest.raises(UsageError, match="are archives of one run, a, but differ"):
        compare([archive(sealed, "a")], [archive(sealed, "a", 50.0)])


@pytest.mark.parametrize(("seconds", "is_known"), [(0.5, True), (0.0, False)])
def test_pairs_of_short_times_have_a_ratio_and_those_of_none_have_not(
    sealed: Path, seconds: float, is_known: bool
) -> None:
    days = (0.0, 90_000.0, 180_000.0)
    a = [archive(sealed, f"a{at}", 0.25, at) for at in days]
    b = [archive(sealed, f"b{at}", seconds, at + 60) for at in days]
    found = compare(a, b).seconds
    ratio = found["task"].ratio if "task" in found else None
    assert (ratio is not None) == is_known
    if ratio is not None:
        assert ratio.mean == pytest.approx(2.0)
