"""`mlbench gate` with sealed archives, and the files that CI systems read."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mlbench_cli.app import run
from tests.unit.results.runs import event, sealed_run

GOOD = (10.0, 10.2, 9.9)


def write_archives(folder: Path, seconds: tuple[float, ...], **changes: object) -> list[str]:
    """Sealed runs with one worker, repeats of each other."""
    return [
        str(sealed_run(folder / f"{index}", "goal_reached", seconds=value, workers=1, name=f"x-1-r{index}", **changes))
        for index, value in enumerate(seconds)
    ]


@pytest.mark.parametrize(
    ("seconds", "code"), [((10.1, 9.9, 10.15), 0), ((11.5, 11.7, 11.4), 7), ((11.0, 13.5, 10.2), 9), ((15.0,), 9)]
)
def test_results_are_held_against_a_folder(tmp_path: Path, seconds: tuple[float, ...], code: int) -> None:
    write_archives(tmp_path / "old", GOOD)
    (tmp_path / "old" / "._x.zip").write_bytes(b"attributes, as macOS writes them beside a file")
    new = write_archives(tmp_path / "new", seconds)
    assert run(["gate", *new, "--baseline", str(tmp_path / "old")]) == code


def test_a_baseline_may_have_a_folder_for_each_session(tmp_path: Path) -> None:
    """As an unpacked artifact has; files of a run that has not ended are no archives."""
    for day, seconds in (("monday", GOOD[:1]), ("tuesday/archives", GOOD[1:])):
        write_archives(tmp_path / "old" / day, seconds, seed=len(day))
    unsealed = tmp_path / "old" / "running"
    (unsealed / "output" / "rank-0").mkdir(parents=True)
    (unsealed / "run.json").write_text("{}")
    (unsealed / "output" / "rank-0" / "model.zip").write_bytes(b"PK")
    new = write_archives(tmp_path / "new", (11.5, 11.7, 11.4))
    assert run(["gate", *new, "--baseline", str(tmp_path / "old")]) == 7


def test_a_direction_is_for_metrics_that_have_none_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_archives(tmp_path / "old", GOOD)
    slow = write_archives(tmp_path / "new", (20.0, 20.4, 19.8))
    gate = ["gate", *slow, "--baseline", str(tmp_path / "old"), "--check", "seconds=+10%"]
    assert run([*gate, "--direction", "lower"]) == 7
    assert run([*gate, "--direction", "higher"]) == 2  # twice as slow is no improvement, whatever else is checked
    assert "lower is better" in capsys.readouterr().err
    write_archives(tmp_path / "earlier", GOOD, lines=[event("metric", at=10.3, name="mine", value=1.0)])
    lines = [event("metric", at=20.5, name="mine", value=1.0)]
    slow = write_archives(tmp_path / "both", (20.0, 20.4, 19.8), lines=lines)
    gate = ["gate", *slow, "--baseline", str(tmp_path / "earlier"), "--check", "seconds=+10%", "--check", "mine=+10%"]
    assert run([*gate, "--direction", "higher", "-o", "json"]) == 7
    seconds, own = json.loads(capsys.readouterr().out)["checks"]
    assert (seconds["direction"], seconds["verdict"], own["direction"]) == ("lower", "failed", "higher")


def test_every_setting_that_is_compared_is_a_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Chance has one more occasion with each, so that each needs more to fail."""
    slower = tuple(1.2 * each for each in (10.0, 10.5, 9.6))
    alone = write_archives(tmp_path / "alone", slower)
    write_archives(tmp_path / "old", (10.0, 10.5, 9.6))
    reasons = []
    for backends in (["gloo"], ["gloo", *(f"b{number}" for number in range(19))]):
        new = list(alone)
        for backend in backends[1:]:
            write_archives(tmp_path / "old" / backend, GOOD, backend=backend)
            new += write_archives(tmp_path / "new" / backend, GOOD, backend=backend)
        run(["gate", *new, "--baseline", str(tmp_path / "old"), "--check", "seconds=1.01", "-o", "json"])
        reasons.append(json.loads(capsys.readouterr().out)["checks"][0])
    assert [each["verdict"] for each in reasons] == ["failed", "cannot_tell"]
    assert "not surely so as one of 20 checks at once" in reasons[1]["reason"]


def test_a_baseline_whose_runs_all_failed_is_said_to_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for index in range(3):
        sealed_run(tmp_path / "old" / f"{index}", "goal_missed", workers=1, name=f"x-1-r{index}")
    new = write_archives(tmp_path / "new", GOOD)
    assert run(["gate", *new, "--baseline", str(tmp_path / "old"), "-o", "json"]) == 9
    (check,) = json.loads(capsys.readouterr().out)["checks"]
    assert check["reason"] == "No run of the baseline with equal conditions succeeded."


def test_what_cannot_be_decided_can_be_allowed(tmp_path: Path) -> None:
    write_archives(tmp_path / "old", GOOD)
    new = write_archives(tmp_path / "new", (11.0, 13.5, 10.2))
    assert run(["gate", *new, "--baseline", str(tmp_path / "old"), "--allow-undecided"]) == 0


def test_functional_results_never_pass_against_their_like(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change = {"functional_only": "one machine"}
    write_archives(tmp_path / "old", GOOD, **change)
    new = write_archives(tmp_path / "new", GOOD, **change)
    assert run(["gate", *new, "--baseline", str(tmp_path / "old"), "-o", "json"]) == 9
    (check,) = json.loads(capsys.readouterr().out)["checks"]
    assert check["verdict"] == "cannot_tell"
    assert "functional, not a performance measurement" in check["reason"]


@pytest.mark.parametrize("change", [{"backend": "mpi"}, {"data": "other"}])
def test_other_conditions_never_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, object]
) -> None:
    write_archives(tmp_path / "old", GOOD)
    new = write_archives(tmp_path / "new", GOOD, **change)
    assert run(["gate", *new, "--baseline", str(tmp_path / "old"), "-o", "json"]) == 9
    assert json.loads(capsys.readouterr().out)["checks"][0]["verdict"] == "cannot_tell"


def test_a_result_that_missed_its_goal_fails(tmp_path: Path) -> None:
    write_archives(tmp_path / "old", GOOD)
    missed = sealed_run(tmp_path / "missed", "goal_missed", seconds=5.0, workers=1)
    assert run(["gate", str(missed), "--baseline", str(tmp_path / "old")]) == 7


def test_files_for_ci_say_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_archives(tmp_path / "old", GOOD)
    new = write_archives(tmp_path / "new", (11.5, 11.7, 11.4))
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    options = ["--junit", str(tmp_path / "junit.xml"), "--bencher", str(tmp_path / "bencher.json")]
    options += ["--action-benchmark", str(tmp_path / "bench"), "--check", "seconds=1.1", "--check", "throughput=1.1"]
    assert run(["gate", *new, "--baseline", str(tmp_path / "old"), *options]) == 7
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("2", "2")
    names = [case.get("name") for case in suite.iter("testcase")]
    assert len(set(names)) == 2
    smaller = json.loads((tmp_path / "bench" / "smaller-is-better.json").read_text())
    bigger = json.loads((tmp_path / "bench" / "bigger-is-better.json").read_text())
    assert [(row["unit"], round(row["value"], 2)) for row in smaller] == [("s", 11.53)]
    assert [row["unit"] for row in bigger] == ["samples/s"]
    bencher = json.loads((tmp_path / "bencher.json").read_text())
    ((_, measures),) = bencher.items()
    assert set(measures) == {"mlbench-seconds", "mlbench-throughput"}
    assert "| failed | 1.15× slower" in (tmp_path / "summary.md").read_text()
    assert "::error title=mlbench gate failed::" in capsys.readouterr().out


def test_foreign_names_cannot_break_the_files(tmp_path: Path) -> None:
    write_archives(tmp_path / "old", GOOD)
    goal = {"metric": "a]]>\x1b[31m<b>|%", "comparison": ">=", "threshold": 80.0, "kind": "full", "value": 80.5}
    new = write_archives(tmp_path / "new", GOOD, goal=goal)
    junit = tmp_path / "junit.xml"
    assert run(["gate", *new, "--baseline", str(tmp_path / "old"), "--junit", str(junit)]) == 7
    ElementTree.parse(junit)


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (["--check", "seconds=0.5"], 2, "factor of at least 1"),
        (["--check", "seconds=fast"], 2, "neither a factor nor a percentage"),
        (["--check", "happiness"], 2, "One of: "),
        (["--junit", "/proc/none/x.xml"], 2, "cannot be written"),
    ],
)
def test_bad_options_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, reason: str
) -> None:
    write_archives(tmp_path / "old", GOOD)
    assert run(["gate", str(tmp_path / "old" / "0"), "--baseline", str(tmp_path / "old"), *words]) == code
    assert reason in capsys.readouterr().err


def test_a_folder_without_archives_is_no_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Which is no error but a verdict: a misspelled result has another exit code, so no pipeline can pass by it."""
    (one,) = write_archives(tmp_path / "new", (10.0,))
    (tmp_path / "empty").mkdir()
    gate = ["gate", one, "--baseline", str(tmp_path / "empty")]
    assert run(gate) == 9
    assert "no archive" in capsys.readouterr().err
    assert run([*gate, "--allow-undecided"]) == 0
    assert "There is no baseline yet" in capsys.readouterr().err
    assert run(["gate", f"{one}x", *gate[2:]]) == 4


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
