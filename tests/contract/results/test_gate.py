"""`mlbench gate` with sealed archives, and the files that CI systems read."""

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from mlbench_cli.app import run
from tests.contract.clients import answer
from tests.unit.results.runs import event, sealed_repeats, sealed_run

GOOD = (10.0, 10.2, 9.9)


@pytest.mark.parametrize(
    ("seconds", "code"), [((10.1, 9.9, 10.15), 0), ((11.5, 11.7, 11.4), 7), ((11.0, 13.5, 10.2), 9), ((15.0,), 9)]
)
def test_results_are_held_against_a_folder(tmp_path: Path, seconds: tuple[float, ...], code: int) -> None:
    sealed_repeats(tmp_path / "old", GOOD)
    (tmp_path / "old" / "._x.zip").write_bytes(b"attributes, as macOS writes them beside a file")
    new = sealed_repeats(tmp_path / "new", seconds)
    gate = ["gate", *new, "--baseline", str(tmp_path / "old")]
    assert run(gate) == code
    assert run([*gate, "--allow-undecided"]) == (0 if code == 9 else code)


def test_a_baseline_may_have_a_folder_for_each_session(tmp_path: Path) -> None:
    """As an unpacked artifact has; files of a run that has not ended are no archives."""
    for day, seconds in (("monday", GOOD[:1]), ("tuesday/archives", GOOD[1:])):
        sealed_repeats(tmp_path / "old" / day, seconds, seed=len(day))
    unsealed = tmp_path / "old" / "running"
    (unsealed / "output" / "rank-0").mkdir(parents=True)
    (unsealed / "run.json").write_text("{}")
    (unsealed / "output" / "rank-0" / "model.zip").write_bytes(b"PK")
    new = sealed_repeats(tmp_path / "new", (11.5, 11.7, 11.4))
    assert run(["gate", *new, "--baseline", str(tmp_path / "old")]) == 7


def test_a_direction_is_for_metrics_that_have_none_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sealed_repeats(tmp_path / "old", GOOD)
    slow = sealed_repeats(tmp_path / "new", (20.0, 20.4, 19.8))
    gate = ["gate", *slow, "--baseline", str(tmp_path / "old"), "--check", "seconds=+10%"]
    assert run([*gate, "--direction", "lower"]) == 7
    assert run([*gate, "--direction", "higher"]) == 2  # twice as slow is no improvement, whatever else is checked
    assert "lower is better" in capsys.readouterr().err
    sealed_repeats(tmp_path / "earlier", GOOD, lines=[event("metric", at=10.3, name="mine", value=1.0)])
    lines = [event("metric", at=20.5, name="mine", value=1.0)]
    slow = sealed_repeats(tmp_path / "both", (20.0, 20.4, 19.8), lines=lines)
    gate = ["gate", *slow, "--baseline", str(tmp_path / "earlier"), "--check", "seconds=+10%", "--check", "mine=+10%"]
    seconds, own = answer(capsys, *gate, "--direction", "higher", code=7)["checks"]
    assert (seconds["direction"], seconds["verdict"], own["direction"]) == ("lower", "failed", "higher")


def test_every_setting_that_is_compared_is_a_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Chance has one more occasion with each, so that each needs more to fail."""
    slower = tuple(1.2 * each for each in (10.0, 10.5, 9.6))
    alone = sealed_repeats(tmp_path / "alone", slower)
    sealed_repeats(tmp_path / "old", (10.0, 10.5, 9.6))
    reasons = []
    for backends in (["gloo"], ["gloo", *(f"b{number}" for number in range(19))]):
        new = list(alone)
        for backend in backends[1:]:
            sealed_repeats(tmp_path / "old" / backend, GOOD, backend=backend)
            new += sealed_repeats(tmp_path / "new" / backend, GOOD, backend=backend)
        run(["gate", *new, "--baseline", str(tmp_path / "old"), "--check", "seconds=1.01", "-o", "json"])
        reasons.append(json.loads(capsys.readouterr().out)["checks"][0])
    assert [each["verdict"] for each in reasons] == ["failed", "cannot_tell"]
    assert "not surely so as one of 20 checks at once" in reasons[1]["reason"]


def test_a_baseline_whose_runs_all_failed_is_said_to_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for index in range(3):
        sealed_run(tmp_path / "old" / f"{index}", "goal_missed", workers=1, name=f"x-1-r{index}")
    new = sealed_repeats(tmp_path / "new", GOOD)
    (check,) = answer(capsys, "gate", *new, "--baseline", str(tmp_path / "old"), code=9)["checks"]
    assert check["reason"] == "No run of the baseline with equal conditions succeeded."


def test_of_a_baseline_without_equal_conditions_the_least_difference_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sealed_repeats(tmp_path / "old" / "far", GOOD, data="other", network="1gbit,1ms")
    sealed_repeats(tmp_path / "old" / "near", GOOD, backend="mpi")
    new = sealed_repeats(tmp_path / "new", GOOD)
    (check,) = answer(capsys, "gate", *new, "--baseline", str(tmp_path / "old"), code=9)["checks"]
    assert (check["verdict"], "Accept it with --across backend." in check["reason"]) == ("cannot_tell", True)


def test_functional_results_never_pass_against_their_like(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change: dict[str, Any] = {"functional_only": "one machine"}
    sealed_repeats(tmp_path / "old", GOOD, **change)
    new = sealed_repeats(tmp_path / "new", GOOD, **change)
    (check,) = answer(capsys, "gate", *new, "--baseline", str(tmp_path / "old"), code=9)["checks"]
    assert check["verdict"] == "cannot_tell"
    assert "functional, not a performance measurement" in check["reason"]


def test_files_for_ci_say_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sealed_repeats(tmp_path / "old", GOOD)
    new = sealed_repeats(tmp_path / "new", (12.5, 12.7, 12.4))
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    options = ["--junit", str(tmp_path / "junit.xml"), "--bencher", str(tmp_path / "bencher.json")]
    options += ["--action-benchmark", str(tmp_path / "bench")]
    for check in ("convergence", "seconds=1.1", "throughput=1.1"):  # the first cannot be decided, the others fail
        options += ["--check", check]
    assert run(["gate", *new, "--baseline", str(tmp_path / "old"), *options]) == 7
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert [suite.get(name) for name in ("tests", "failures", "skipped")] == ["3", "2", "1"]
    cases = [(case.get("name"), [each.tag for each in case]) for case in suite.iter("testcase")]
    assert [tags for _, tags in cases] == [["skipped"], ["failure"], ["failure"]]
    assert len({name for name, _ in cases}) == 3
    smaller = json.loads((tmp_path / "bench" / "smaller-is-better.json").read_text())
    bigger = json.loads((tmp_path / "bench" / "bigger-is-better.json").read_text())
    assert [(row["unit"], round(row["value"], 2)) for row in smaller] == [("s", 12.53)]
    assert [row["unit"] for row in bigger] == ["samples/s"]
    bencher = json.loads((tmp_path / "bencher.json").read_text())
    ((_, measures),) = bencher.items()
    assert set(measures) == {"mlbench-seconds", "mlbench-throughput"}
    ends = [measures["mlbench-seconds"][end] for end in ("lower_value", "upper_value")]
    assert ends == pytest.approx([12.4, 12.7])
    assert "| failed | 1.25× slower" in (tmp_path / "summary.md").read_text()
    (annotation,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("::")]
    assert re.match(r"::error title=mlbench gate failed::[^:]+: seconds: .*\(and 1 more\)$", annotation)


def test_foreign_names_cannot_break_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    piped = sealed_repeats(tmp_path / "piped", GOOD, task="custom", preset="custom", argv=("sh", "-c", "a | b"))
    assert run(["gate", *piped, "--baseline", str(tmp_path / "piped")]) == 9
    rows = [line for line in (tmp_path / "summary.md").read_text().splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {5}
    sealed_repeats(tmp_path / "old", GOOD)
    goal = {"metric": "a]]>\x1b[31m<b>|%", "comparison": ">=", "threshold": 80.0, "kind": "full", "value": 80.5}
    new = sealed_repeats(tmp_path / "new", GOOD, goal=goal)
    junit = tmp_path / "junit.xml"
    assert run(["gate", *new, "--baseline", str(tmp_path / "old"), "--junit", str(junit)]) == 7
    ElementTree.parse(junit)


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (["--check", "seconds=0.5"], 2, "factor of at least 1"),
        (["--check", "seconds=fast"], 2, "neither a factor nor a percentage"),
        (["--check", "happiness"], 2, "One of: "),
        (["--check", "seconds=1.1", "--check", "seconds=1.2"], 2, "is checked twice"),
    ],
)
def test_bad_options_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, reason: str
) -> None:
    sealed_repeats(tmp_path / "old", GOOD)
    assert run(["gate", str(tmp_path / "old" / "0"), "--baseline", str(tmp_path / "old"), *words]) == code
    assert reason in capsys.readouterr().err


def test_a_folder_without_archives_is_no_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Which is no error but a verdict: a misspelled result has another exit code, so no pipeline can pass by it."""
    (one,) = sealed_repeats(tmp_path / "new", (10.0,))
    (tmp_path / "empty").mkdir()
    gate = ["gate", one, "--baseline", str(tmp_path / "empty")]
    assert run(gate) == 9
    assert "no archive" in capsys.readouterr().err
    assert run([*gate, "--allow-undecided"]) == 0
    assert "There is no baseline yet" in capsys.readouterr().err
    assert run(["gate", f"{one}x", *gate[2:]]) == 4


@pytest.mark.parametrize(("limit", "words"), [("1.001", "limit +0.1 %;"), ("+10%", "limit 1.1× (+10 %);")])
def test_a_limit_close_to_1_is_told_in_percent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], limit: str, words: str
) -> None:
    new = sealed_repeats(tmp_path / "new", GOOD)
    sealed_repeats(tmp_path / "old", GOOD)
    run(["gate", *new, "--baseline", str(tmp_path / "old"), "--check", f"seconds={limit}", "-o", "json"])
    assert words in json.loads(capsys.readouterr().out)["checks"][0]["reason"]


@pytest.mark.parametrize(
    ("limit", "readings"),
    [
        ("110%", "1.1, or +110%"),
        ("+10", "+900%, or +10%"),
        ("5", "+400%, or +5%"),
        ("110 %", "1.1, or +110%"),
        ("90%", "1.111, or +90%"),
        ("9e1%", "1.111, or +9e1%"),
    ],
)
def test_a_limit_with_two_readings_is_refused_with_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], limit: str, readings: str
) -> None:
    archive = str(sealed_run(tmp_path / "a"))
    assert run(["gate", archive, "--baseline", archive, "--check", f"seconds={limit}"]) == 2
    assert readings in capsys.readouterr().err
