"""`compare` and `gate`: which results are compared, what is printed and written, and the exit code."""

import json
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from mlbench_cli import api, console
from mlbench_cli.commands import compare as compare_module
from mlbench_cli.commands import gate as gate_module
from mlbench_cli.commands.compare import _archives, _show, compare
from mlbench_cli.commands.gate import gate
from mlbench_cli.console import Format
from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.results.analysis import baseline
from mlbench_cli.results.analysis.baseline import Check, Wanted
from mlbench_cli.results.analysis.compare import Comparison, ComparisonRow, Obstacle
from mlbench_cli.results.analysis.gate import Direction
from mlbench_cli.results.analysis.history import Judged
from mlbench_cli.results.analysis.sessions import Sessions
from mlbench_cli.results.analysis.statistics import Estimate
from mlbench_cli.results.analysis.verdict import Verdict

Captured = pytest.CaptureFixture[str]
ONE_SESSION = Sessions((1, 1, 1), (1, 1, 1))
FASTER = ComparisonRow(Estimate(3, 10.0, 9.0, 11.0), Estimate(3, 5.0, 4.5, 5.5), Estimate(3, 0.5, 0.45, 0.55))
SLOWER = ComparisonRow(Estimate(3, 5.0, 4.5, 5.5), Estimate(3, 10.0, 9.0, 11.0), Estimate(3, 2.0, 1.8, 2.2))
ALONE = ComparisonRow(Estimate(1, 10.0), Estimate(1, 5.0), Estimate(1, 0.5))


def comparison(**changes: Any) -> Comparison:
    fields: dict[str, Any] = {
        "a": "old", "b": "new", "differences": {}, "obstacles": (), "seconds": {"run": FASTER}, "others": {},
        "sessions": ONE_SESSION,
    }  # fmt: skip
    return Comparison(**{**fields, **changes})


def cells(text: str) -> list[list[str]]:
    """The cells of each line, which are two spaces or more apart."""
    return [re.split(r" {2,}", line.replace("\u00a0", " ")) for line in text.splitlines()]


# --- what compare prints ----------------------------------------------------------------------------------------------


def test_a_comparison_is_a_sentence_and_tables(capsys: Captured) -> None:
    found = comparison(
        seconds={"run": FASTER, "forward": ComparisonRow(Estimate(1, 2.0), None, None)},
        others={
            "Prec@1": ComparisonRow(
                Estimate(3, 80.0, 79.0, 81.0), Estimate(3, 90.0, 89.0, 91.0), Estimate(3, 1.125, 1.1, 1.15), True
            ),
            "odd": ComparisonRow(Estimate(1, 2.0), Estimate(1, 3.0), Estimate(1, 1.5), None),
        },
        differences={"workers": (1, 2), "method": (None, "dgc")},
    )
    _show(found)
    printed = capsys.readouterr()
    assert cells(printed.out) == [
        ["new is 2.00× faster than old (95 %: 1.82 to 2.22; 3 and 3 runs)."],
        [""],
        ["TIME", "old", "new", "B AGAINST A"],
        ["run", "10.0 s (9.0 to 11.0)", "5.00 s (4.50 to 5.50)", "2.00× faster (1.82 to 2.22)"],
        ["forward", "2.00 s", "–", "–"],
        [""],
        ["FIGURE", "old", "new", "B AGAINST A"],
        ["Prec@1", "80.0 % (79.0 to 81.0)", "90.0 % (89.0 to 91.0)", "10.0 points higher"],
        ["odd", "2.00", "3.00", "1.50× more, too few runs"],
        [""],
        ["DIFFERENCE", "old", "new"],
        ["workers", "1", "2"],
        ["method", "None", "dgc"],
    ]
    assert printed.err == (
        "In parentheses: the 95 % interval of the mean (Student's t), for two runs their range. Failed runs are left "
        "out.\nSessions: one session: the interval has no session spread.\n"
    )


def test_what_weakens_a_comparison_is_told_with_how_to_accept_it(capsys: Captured) -> None:
    found = comparison(
        seconds={"run": ALONE},
        obstacles=(Obstacle("workers", "The numbers of workers differ."), Obstacle("", "x is on both sides.")),
        energy_sources=("RAPL", "NVML"),
        sessions=Sessions((1,), (1,), in_blocks=True),
    )
    _show(found)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:3] == [
        "Warning: The numbers of workers differ. Accept it with --across workers.",
        "Warning: x is on both sides.",
        "Energy by RAPL; NVML. Per sample: mean power over samples per second.",
    ]
    assert lines[3].startswith("Warning: All runs of one side came before those of the other")
    assert len(lines) == 4  # single runs have no intervals to explain


def test_times_that_one_side_lacks_have_no_verdict(capsys: Captured) -> None:
    _show(comparison(seconds={"run": ComparisonRow(Estimate(1, 2.0), None, None)}))
    printed = capsys.readouterr()
    assert printed.out.startswith("TIME")
    assert "DIFFERENCE" not in printed.out
    assert printed.err == ""
    _show(comparison(seconds={}, others={"x": ComparisonRow(None, Estimate(2, 1.0, 0.5, 1.5), None)}))
    assert "Sessions: " in capsys.readouterr().err  # an interval on either side is explained


# --- what compare decides ---------------------------------------------------------------------------------------------


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """`compare` with these comparisons by the values of their cells; the list is what it asked for."""

    def prepare(found: Any, alone: Sequence[str] = (), runs: int = 1) -> list[Any]:
        asked: list[Any] = []

        def open_archives(paths: list[Path], stack: ExitStack, *, unproven: bool) -> list[Any]:
            asked.append((paths, unproven))
            return [SimpleNamespace(run={"name": f"{path}-2"}) for path in paths * runs]

        def compare_cells(a: Any, b: Any, names: tuple[str, str], across: Any) -> Any:
            asked.append((len(a), len(b), names, across))
            return found, list(alone)

        monkeypatch.setattr(compare_module, "_archives", lambda word: [word])
        monkeypatch.setattr(compare_module, "open_archives", open_archives)
        monkeypatch.setattr(compare_module, "compare_cells", compare_cells)
        return asked

    return prepare


def test_a_comparison_alone_passes(compared: Callable[..., list[Any]], capsys: Captured) -> None:
    asked = compared({(): comparison(seconds={"run": SLOWER})})
    assert compare("x", "y") == 0
    assert asked == [(["x"], False), (["y"], False), (1, 1, ("x-2", "y-2"), frozenset())]
    printed = capsys.readouterr()
    assert printed.out.startswith("new is 2.00× slower than old")
    assert "Omitted" not in printed.err
    assert "limit" not in printed.err


def test_repeats_have_the_name_that_they_were_given(compared: Callable[..., list[Any]]) -> None:
    asked = compared({(): comparison()}, runs=2)
    assert compare("x", "y", across=["workers"], unproven=True) == 0
    assert asked == [(["x"], True), (["y"], True), (2, 2, ("x", "y"), frozenset({"workers"}))]


@pytest.mark.parametrize(
    ("row", "limit", "code", "words"),
    [
        (SLOWER, "2.2", 0, "Passed. run: new against old: 2.00× slower (1.80 to 2.20); limit 2.2× (+120 %); one"),
        (SLOWER, "+120%", 0, "Passed. run: new"),
        (SLOWER, "2.1", 9, "Cannot tell. run: new"),
        (SLOWER, "1.8", 9, "Cannot tell. run: new"),
        (SLOWER, "1.7", 7, "Failed. run: new"),
        (ALONE, "2", 9, "Cannot tell. run: new"),
    ],
)
def test_a_limit_decides_by_the_interval(
    compared: Callable[..., list[Any]], capsys: Captured, row: ComparisonRow, limit: str, code: int, words: str
) -> None:
    compared({(): comparison(seconds={"run": row})})
    assert compare("x", "y", limit) == code
    assert capsys.readouterr().err.splitlines()[-1].startswith(words)


def test_each_cell_has_a_heading_and_a_verdict(compared: Callable[..., list[Any]], capsys: Captured) -> None:
    found = {
        (("workers", "1"),): comparison(),
        (("workers", "2"),): comparison(seconds={"run": SLOWER}),
    }
    compared(found, ["4 workers (A only)", "8 workers (B only)"])
    assert compare("x", "y", "1.2") == 7
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0] == "1 worker"
    assert lines[lines.index("2 workers") - 1] == ""
    notes = printed.err.splitlines()
    assert "Warning: Omitted, because only one side has it: 4 workers (A only); 8 workers (B only)." in notes
    assert notes[-2].startswith("1 worker: Passed. run: ")
    assert notes[-1].startswith("2 workers: Failed. run: ")
    assert compare("x", "y", "1.2", output=Format.json) == 7
    document = json.loads(capsys.readouterr().out)
    assert [(each["cell"], each["gate"]["verdict"]) for each in document["comparisons"]] == [
        ({"workers": "1"}, "passed"),
        ({"workers": "2"}, "failed"),
    ]
    assert (document["verdict"], document["left_out"]) == ("failed", ["4 workers (A only)", "8 workers (B only)"])


def test_figure_and_direction_are_those_of_a_limit(compared: Callable[..., list[Any]], capsys: Captured) -> None:
    odd = ComparisonRow(Estimate(3, 1.0, 0.9, 1.1), Estimate(3, 2.0, 1.9, 2.1), Estimate(3, 2.0, 1.8, 2.2), None)
    asked = compared({(): comparison(others={"odd": odd})})
    for options in ({"metric": "odd"}, {"direction": Direction.LOWER}, {"metric": "odd", "direction": "lower"}):
        with pytest.raises(UsageError, match="choose the figure of --fail-above, which is missing"):
            compare("x", "y", **options)
    with pytest.raises(UsageError, match="--fail-above"):
        compare("x", "y", "fast")
    with pytest.raises(UsageError, match="--across"):
        compare("x", "y", across=["wokers"])
    assert asked == []
    assert compare("x", "y", "1.2", "odd", Direction.LOWER) == 7
    assert compare("x", "y", "1.2", "odd", Direction.HIGHER) == 0
    capsys.readouterr()
    with pytest.raises(UsageError, match="whether lower or higher is better"):
        compare("x", "y", "1.2", "odd")


# --- which results ----------------------------------------------------------------------------------------------------


class Client:
    """A client that knows the run "demo" with two repeats, and finds any archive."""

    def __init__(self, notice: Any = None) -> None:
        self.notice = notice

    def find_archives(self, words: Sequence[str]) -> list[Path]:
        return [Path("found", word) for word in words]

    def find_archives_below(self, folder: Path) -> list[Path]:
        return [Path("below", folder.name)]

    def select(self, names: Sequence[str], *, repeats: bool) -> Any:
        assert repeats
        if names != ["demo"]:
            raise NotFoundError("There is no run of that name.")
        return SimpleNamespace(runs=[SimpleNamespace(results=Path("runs", number)) for number in "ab"])


def test_a_word_is_a_path_by_its_form_else_a_run_else_a_path_that_exists(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Captured
) -> None:
    monkeypatch.setattr(api, "Client", Client)
    monkeypatch.chdir(tmp_path)
    assert _archives("./demo") == [Path("found/demo")]
    assert _archives("demo.zip") == [Path("found/demo.zip")]
    assert _archives("demo") == [Path("runs/a"), Path("runs/b")]
    with pytest.raises(NotFoundError):
        _archives("other")
    assert capsys.readouterr().err == ""
    for name in ("demo", "other"):
        (tmp_path / name).mkdir()
    assert _archives("other") == [Path("other")]
    assert capsys.readouterr().err == ""
    assert _archives("demo") == [Path("runs/a"), Path("runs/b")]
    assert capsys.readouterr().err == '"demo" means the run of that name; for the folder, use ./demo\n'


# --- gate -------------------------------------------------------------------------------------------------------------

PASSED = Check("a: seconds", "seconds", 2, (9.0, 11.0), (10.0,), False, 1.1, Judged(Verdict.PASSED, "Fine.", 1.0))
FAILED = Check(
    "a: throughput", "throughput", 2, (5.0,), (10.0,), True, 1.1, Judged(Verdict.FAILED, "Slow.", 2.0, 1.9, 2.1)
)
UNDECIDED = Check("b: seconds", "seconds", 4, (), (), False, 1.1, Judged(Verdict.CANNOT_TELL, "No run."))


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """`gate` with these checks; the list is what it asked for."""
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)

    def prepare(*found: Check) -> list[Any]:
        asked: list[Any] = []

        def open_archives(paths: Sequence[Path], stack: ExitStack, *, unproven: bool) -> list[Any]:
            return [(path, unproven) for path in paths]

        def check_results(new: Any, old: Any, wanted: Any) -> list[Check]:
            asked.append((new, old, wanted))
            return list(found)

        monkeypatch.setattr(api, "Client", Client)
        monkeypatch.setattr(gate_module, "open_archives", open_archives)
        monkeypatch.setattr(baseline, "check_results", check_results)
        return asked

    return prepare


def test_a_baseline_is_a_folder_or_a_name(
    checked: Callable[..., list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = checked(PASSED)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    assert gate(["x", "y"], "demo") == 0
    assert gate(["x"], "folder", ["throughput=+20%", "seconds"], unproven=True) == 0
    assert asked == [
        ([(Path("found/x"), False), (Path("found/y"), False)], [(Path("found/demo"), False)], [Wanted("seconds", 1.1)]),
        (
            [(Path("found/x"), True)],
            [(Path("below/folder"), True)],
            [Wanted("throughput", 1.2), Wanted("seconds", 1.1)],
        ),
    ]


@pytest.mark.parametrize(
    ("found", "allows", "code", "is_told"),
    [
        ([PASSED], False, 0, False),
        ([PASSED, FAILED], False, 7, False),
        ([PASSED, UNDECIDED], False, 9, True),
        ([PASSED, UNDECIDED], True, 0, True),
        ([FAILED, UNDECIDED], True, 7, False),
        ([], False, 9, True),
    ],
)
def test_the_worst_check_is_the_exit_code(
    checked: Callable[..., list[Any]], capsys: Captured, found: list[Check], allows: bool, code: int, is_told: bool
) -> None:
    checked(*found)
    assert gate(["x"], "demo", allows_undecided=allows) == code
    words = "Warning: Some checks are undecided; more repeats or a longer history may decide them.\n"
    assert capsys.readouterr().err == (words if is_told else "")


def test_checks_are_a_table_or_a_document(checked: Callable[..., list[Any]], capsys: Captured) -> None:
    checked(PASSED, FAILED, UNDECIDED)
    gate(["x"], "demo")
    assert cells(capsys.readouterr().out) == [
        ["CHECK", "VERDICT", "REASON"],
        ["a: seconds", "passed", "Fine."],
        ["a: throughput", "failed", "Slow."],
        ["b: seconds", "cannot tell", "No run."],
    ]
    gate(["x"], "demo", output=Format.json)
    checks = [
        {
            "name": "a: seconds", "metric": "seconds", "workers": 2, "limit": 1.1, "values": [9.0, 11.0],
            "baseline": [10.0], "verdict": "passed", "reason": "Fine.", "worse": 1.0, "low": None, "high": None,
        },
        {
            "name": "a: throughput", "metric": "throughput", "workers": 2, "limit": 1.1, "values": [5.0],
            "baseline": [10.0], "verdict": "failed", "reason": "Slow.", "worse": 2.0, "low": 1.9, "high": 2.1,
        },
        {
            "name": "b: seconds", "metric": "seconds", "workers": 4, "limit": 1.1, "values": [], "baseline": [],
            "verdict": "cannot_tell", "reason": "No run.", "worse": None, "low": None, "high": None,
        },
    ]  # fmt: skip
    assert json.loads(capsys.readouterr().out) == {"schema_version": 1, "verdict": "failed", "checks": checks}


def test_files_for_ci_are_written_into_new_folders(checked: Callable[..., list[Any]], tmp_path: Path) -> None:
    checked(PASSED, FAILED, UNDECIDED)
    junit, folder, bencher = tmp_path / "a" / "junit.xml", tmp_path / "b", tmp_path / "c" / "d" / "bencher.json"
    assert gate(["x"], "demo", junit=junit, benchmark=folder, bencher=bencher) == 7
    suite = ElementTree.parse(junit).getroot()
    assert [suite.get(name) for name in ("tests", "failures", "skipped", "errors")] == ["3", "1", "1", "0"]
    assert json.loads((folder / "smaller-is-better.json").read_text()) == [
        {"name": "a: seconds", "unit": "s", "value": 10.0, "range": "± 1"}
    ]
    assert json.loads((folder / "bigger-is-better.json").read_text()) == [
        {"name": "a: throughput", "unit": "samples per second", "value": 5.0, "range": "± 0"}
    ]
    assert json.loads(bencher.read_text()) == {
        "a": {
            "mlbench-seconds": {"value": 10.0, "lower_value": 9.0, "upper_value": 11.0},
            "mlbench-throughput": {"value": 5.0, "lower_value": 5.0, "upper_value": 5.0},
        }
    }
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"file/x\.xml cannot be written: .*[Ff]ile exists|Not a directory"):
        gate(["x"], "demo", junit=tmp_path / "file" / "x.xml")


def test_on_github_the_verdict_is_an_annotation_and_added_to_the_summary(
    checked: Callable[..., list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    checked(PASSED, FAILED)
    summary = tmp_path / "summary.md"
    summary.write_text("Before.\n")
    gate(["x"], "demo")
    assert "::error" not in capsys.readouterr().out
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    monkeypatch.setattr(console, "is_on_github", lambda: True)
    gate(["x"], "demo")
    assert capsys.readouterr().out.splitlines()[-1] == "::error title=mlbench gate failed::a: throughput: Slow."
    assert summary.read_text().splitlines()[:3] == ["Before.", "## mlbench gate: failed", ""]
    assert "| a: throughput | failed | 2.00× | Slow. |" in summary.read_text()
    gate(["x"], "demo", output=Format.json)
    assert "::error" not in capsys.readouterr().out
    assert summary.read_text().count("## mlbench gate: failed") == 2
