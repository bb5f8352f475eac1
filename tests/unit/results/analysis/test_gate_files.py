"""The files and lines that CI systems read from a gate: whole documents, escaping and limits."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from mlbench_cli.errors import CannotTellError, TaskFailedError, UsageError
from mlbench_cli.results.analysis import baseline
from mlbench_cli.results.analysis.baseline import (
    Check,
    Wanted,
    check_results,
    figures_of,
    format_action_benchmark,
    format_annotation,
    format_bencher,
    format_junit,
    format_summary,
    overall,
)
from mlbench_cli.results.analysis.history import Judged
from mlbench_cli.results.analysis.verdict import Verdict
from mlbench_cli.results.archive.reader import Archive


def check(
    verdict: Verdict = Verdict.PASSED,
    name: str = "t spec gloo cpu 2: seconds",
    reason: str = "why",
    values: tuple[float, ...] = (1.0, 2.0, 4.5),
    **changes: Any,
) -> Check:
    judged = Judged(verdict, reason, *changes.pop("figures", (1.25, 1.2, 1.3)))
    fields = {"metric": "seconds", "workers": 2, "baseline": (1.0,), "higher_is_better": False, "limit": 1.1}
    return Check(name=name, values=values, judged=judged, **{**fields, **changes})


FAILED, UNKNOWN = check(Verdict.FAILED, "f"), check(Verdict.CANNOT_TELL, "u")


def test_a_check_as_a_document() -> None:
    assert check(Verdict.CANNOT_TELL).to_dict() == {
        "name": "t spec gloo cpu 2: seconds",
        "metric": "seconds",
        "workers": 2,
        "limit": 1.1,
        "values": [1.0, 2.0, 4.5],
        "baseline": [1.0],
        "verdict": "cannot_tell",
        "reason": "why",
        "worse": 1.25,
        "low": 1.2,
        "high": 1.3,
    }


def test_junit_counts_failures_and_skips_what_cannot_be_told() -> None:
    text = format_junit([check(), check(Verdict.FAILED, "a<b", "1 & 2\x00"), UNKNOWN, check(Verdict.FAILED, "g")])
    assert text.startswith(b"<?xml version='1.0' encoding='utf-8'?>\n")
    assert text.endswith(b"</testsuites>\n")
    root = ElementTree.fromstring(text)
    totals = {"tests": "4", "failures": "2", "errors": "0", "skipped": "1", "time": "0"}
    assert (root.tag, root.attrib) == ("testsuites", {"name": "mlbench", **totals})
    [suite] = root
    assert (suite.tag, suite.attrib) == ("testsuite", {"name": "mlbench gate", **totals})
    assert [(case.tag, case.attrib) for case in suite] == [
        ("testcase", {"name": name, "classname": "mlbench.gate", "time": "0"})
        for name in ("t spec gloo cpu 2: seconds", "a<b", "u", "g")
    ]
    assert [[(child.tag, child.attrib) for child in case] for case in suite] == [
        [],
        [("failure", {"message": "1 & 2?"})],
        [("skipped", {"message": "why"})],
        [("failure", {"message": "why"})],
    ]


HEAD = "| check | verdict | worse by | reason |\n| --- | --- | ---: | --- |\n"


def test_the_summary_is_a_table_in_which_nothing_is_markup() -> None:
    odd = check(Verdict.CANNOT_TELL, "a|b\n<i> & *c*", "`x` [y](z) \\ \x01", figures=(None,))
    assert format_summary([check(), odd]) == (
        f"{HEAD}| t spec gloo cpu 2: seconds | passed | 1.25× | why |\n"
        r"| a\|b &lt;i&gt; &amp; \*c\* | cannot tell | – | \`x\` \[y\](z) \\ ? |"
        "\n"
    )
    assert format_summary([]) == HEAD


def test_a_summary_is_cut_at_a_row_and_says_how_many_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """GitHub drops a step summary above its limit as a whole. Its limit counts bytes: "×" and "ü" have two."""
    checks = [check(name=f"ü{number}") for number in range(4)]
    whole = format_summary(checks)
    monkeypatch.setattr(baseline, "MAX_SUMMARY_BYTES", len(whole.encode()))
    assert format_summary(checks) == whole
    monkeypatch.setattr(baseline, "MAX_SUMMARY_BYTES", len(whole.encode()) - 1)
    assert format_summary(checks) == "\n".join(whole.splitlines()[:5]) + "\n\n1 more checks are omitted.\n"
    monkeypatch.setattr(baseline, "MAX_SUMMARY_BYTES", len(HEAD.encode()))
    assert format_summary(checks) == f"{HEAD}\n4 more checks are omitted.\n"


@pytest.mark.parametrize(
    ("verdict", "checks", "line"),
    [
        (Verdict.PASSED, [check(name="a: b")], "::notice title=mlbench gate passed::a: b: why"),
        (Verdict.FAILED, [check(), FAILED], "::error title=mlbench gate failed::f: why"),
        (Verdict.FAILED, [FAILED, FAILED, FAILED], "::error title=mlbench gate failed::f: why (and 2 more)"),
        (Verdict.CANNOT_TELL, [UNKNOWN, UNKNOWN], "::warning title=mlbench gate cannot tell::u: why (and 1 more)"),
        (Verdict.CANNOT_TELL, [], "::warning title=mlbench gate cannot tell::"),
        (
            Verdict.FAILED,
            [check(Verdict.FAILED, "f", "50 %\r\n::error::x")],
            "::error title=mlbench gate failed::f: 50 %25%0D%0A::error::x",
        ),
    ],
)
def test_an_annotation_is_one_line_with_the_first_check_of_its_verdict(
    verdict: Verdict, checks: list[Check], line: str
) -> None:
    assert format_annotation(verdict, checks) == line


def test_files_of_github_action_benchmark_have_one_direction_each() -> None:
    seconds = check()
    rate = check(name="t: throughput", metric="throughput", values=(10.0,), higher_is_better=True)
    goal = check(name="t: Prec@1", metric="Prec@1", values=(80.0, 81.0), higher_is_better=True)
    checks = [seconds, rate, goal, check(values=())]
    assert json.loads(format_action_benchmark(checks, higher_is_better=False)) == [
        {"name": "t spec gloo cpu 2: seconds", "unit": "s", "value": 2.5, "range": "± 1.75"}
    ]
    text = format_action_benchmark(checks, higher_is_better=True)
    assert json.loads(text) == [
        {"name": "t: throughput", "unit": "samples per second", "value": 10.0, "range": "± 0"},
        {"name": "t: Prec@1", "unit": "Prec@1", "value": 80.5, "range": "± 0.5"},
    ]
    assert text.startswith('[\n  {\n    "name"')
    assert text.endswith("]\n")
    assert format_action_benchmark([], higher_is_better=True) == "[]\n"


def test_bencher_gets_measures_by_benchmark_with_their_range() -> None:
    rate = check(name="t spec gloo cpu 2: throughput", metric="throughput", values=(10.0,))
    odd = check(name=f"{'x' * 1030}: y", metric="All reduce, GB/s " + "z" * 60, values=(3.0, 1.0))
    assert json.loads(format_bencher([check(), rate, odd, check(values=())])) == {
        "t spec gloo cpu 2": {
            "mlbench-seconds": {"value": 2.5, "lower_value": 1.0, "upper_value": 4.5},
            "mlbench-throughput": {"value": 10.0, "lower_value": 10.0, "upper_value": 10.0},
        },
        "x" * 1024: {
            ("mlbench-all-reduce-gb-s-" + "z" * 60)[:64]: {"value": 2.0, "lower_value": 1.0, "upper_value": 3.0}
        },
    }


@pytest.mark.parametrize(
    ("checks", "verdict"),
    [
        ([check(), UNKNOWN, FAILED], Verdict.FAILED),
        ([check(), UNKNOWN], Verdict.CANNOT_TELL),
        ([check(), check()], Verdict.PASSED),
        ([], Verdict.CANNOT_TELL),
    ],
)
def test_the_worst_check_decides_and_no_check_decides_nothing(checks: list[Check], verdict: Verdict) -> None:
    assert overall(checks) is verdict


@pytest.mark.parametrize(
    ("verdict", "code"),
    [
        (Verdict.PASSED, 0),
        (Verdict.FAILED, TaskFailedError.exit_code),
        (Verdict.CANNOT_TELL, CannotTellError.exit_code),
    ],
)
def test_exit_codes_tell_a_failure_from_what_cannot_be_told(verdict: Verdict, code: int) -> None:
    assert verdict.exit_code == code


# --- which figures and cells are checked ----------------------------------------------------------------------------


def archive(path: Path, run: str, seconds: float = 100.0, **result: Any) -> Archive:
    """Another run with the same evidence; `seconds` of its training."""
    found = Archive.open(path)
    found.run["id"] = found.result["id"] = run
    found.run["name"] = run
    found.result["task_seconds"] = {"wall": seconds, "training": seconds}
    found.result.update(result)  # type: ignore[typeddict-item]
    return found


def test_the_figures_of_a_run_and_which_way_is_good(sealed: Path) -> None:
    """51,200 samples in 100 s, of which 10 s are validation, and a goal of at least 80 %."""
    found = figures_of(Archive.open(sealed))
    assert found == {
        "seconds": (100.0, False),
        "throughput": (pytest.approx(51200 / 90.0), True),
        "Prec@1": (80.5, True),
    }
    goal = {**Archive.open(sealed).result["goal"], "comparison": "<="}  # type: ignore[dict-item]
    assert figures_of(archive(sealed, "x", goal=goal))["Prec@1"] == (80.5, False)
    assert "Prec@1" not in figures_of(archive(sealed, "x", goal=None))
    assert "throughput" not in figures_of(archive(sealed, "x", samples=None))


def test_checks_are_named_by_task_backend_device_and_size_and_numbered_if_they_are_alike(sealed: Path) -> None:
    results = [archive(sealed, str(number)) for number in range(5)]
    results[1].run["spec"]["parameters"] = {"batch_size": 1}
    results[2].run["spec"]["parameters"] = {"batch_size": 2}
    results[3].result["workers"] = 4
    results[4].run["spec"]["parameters"] = {"batch_size": 1}
    found = check_results(results, [], [Wanted(), Wanted("throughput")])
    assert [(each.name, each.workers, len(each.values)) for each in found[::2]] == [
        ("unknown-task spec gloo cpu 2: seconds", 2, 1),
        ("unknown-task spec gloo cpu 2 #2: seconds", 2, 2),
        ("unknown-task spec gloo cpu 2 #3: seconds", 2, 1),
        ("unknown-task spec gloo cpu 4: seconds", 4, 1),
    ]
    assert [each.name.rpartition(": ")[2] for each in found] == ["seconds", "throughput"] * 4
    assert {each.limit for each in found} == {1.1}


def test_a_baseline_of_other_sizes_or_tasks_is_said_to_be_missing(sealed: Path) -> None:
    four, other = archive(sealed, "four"), archive(sealed, "other")
    four.result["workers"] = 4
    other.run["spec"]["task"] = "another"
    for earlier in ([], [four], [other]):
        [found] = check_results([archive(sealed, "new")], earlier, [Wanted()])
        assert found.judged.reason == "the baseline has no run of this task with 2 workers"
        assert found.judged.verdict is Verdict.CANNOT_TELL


def test_the_nearest_run_of_a_baseline_says_what_is_different(sealed: Path) -> None:
    far, near = archive(sealed, "far"), archive(sealed, "near")
    far.run["spec"].update({"backend": "mpi", "preset": "legacy"})
    near.run["spec"]["backend"] = "nccl"
    [found] = check_results([archive(sealed, "new")], [far, near], [Wanted()])
    assert found.judged.reason == ("no run of the baseline has equal conditions. The backends differ: nccl and gloo.")


def test_conditions_of_results_are_in_the_reason(sealed: Path) -> None:
    known = {"measured": True, "labels": [], "crowded": None, "contended": None, "quota_limited": None, "shared": None}
    shared = {**known, "labels": ["shared"], "shared": {"reason": "x", "figures": {}}}
    crowded = {**known, "labels": ["crowded"], "crowded": {"reason": "x", "figures": {}}}
    results = [archive(sealed, "1", conditions=shared), archive(sealed, "2", conditions=crowded)]
    [found] = check_results(results, [archive(sealed, "3")], [Wanted()])
    assert found.judged.reason.endswith("; measured under other conditions: crowded, shared")
    [quiet] = check_results([archive(sealed, "1")], [archive(sealed, "3", conditions=shared)], [Wanted()])
    assert "other conditions" not in quiet.judged.reason


@pytest.mark.parametrize(
    ("text", "metric", "factor"),
    [("seconds=+10%", "seconds", 1.1), ("seconds=+0%", "seconds", 1.0), ("throughput=2", "throughput", 2.0)],
)
def test_a_limit_is_a_factor_or_a_share(text: str, metric: str, factor: float) -> None:
    found = Wanted.parse(text)
    assert found.metric == metric
    assert found.limit == pytest.approx(factor)


def test_an_unknown_figure_is_refused_with_the_known_ones_in_order(sealed: Path) -> None:
    with pytest.raises(UsageError, match='No result has "speed"') as caught:
        check_results([archive(sealed, "1")], [], [Wanted("speed")])
    assert caught.value.hint == "One of: Prec@1, seconds, throughput"
