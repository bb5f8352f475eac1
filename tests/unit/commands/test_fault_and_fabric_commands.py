"""`goodput`, `fabric` and `baselines`: which results are opened, what is printed, and the exit code."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli import api
from mlbench_cli.commands import baselines as baselines_module
from mlbench_cli.commands import fabric as fabric_module
from mlbench_cli.commands import goodput as goodput_module
from mlbench_cli.commands.baselines import check, record, show
from mlbench_cli.commands.fabric import fabric
from mlbench_cli.commands.goodput import goodput
from mlbench_cli.console import Format
from mlbench_cli.errors import UsageError
from mlbench_cli.results.analysis.expected import CheckedFigure, Expected, SlowLink
from mlbench_cli.results.analysis.fabric import FabricReport, Job
from mlbench_cli.results.analysis.goodput import Goodput
from mlbench_cli.results.analysis.verdict import Verdict
from mlbench_cli.results.archive.faults import PARTS

Captured = pytest.CaptureFixture[str]


class Client:
    """A client that finds an archive for each word."""

    def __init__(self, notice: Any = None) -> None:
        pass

    def find_archives(self, words: Sequence[str]) -> list[Path]:
        return [Path(word) for word in words]


@pytest.fixture(autouse=True)
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """What is opened: the words of archives, and those of options with their names."""
    seen: list[Any] = []

    def open_archives(paths: Sequence[Path], stack: ExitStack, *, unproven: bool = False) -> list[Any]:
        seen.append(([str(path) for path in paths], unproven))
        return [SimpleNamespace(name=str(path)) for path in paths]

    def open_reference(client: Any, name: str | None, option: str, stack: ExitStack, *, unproven: bool) -> Any:
        if name is not None:
            seen.append((option, name, unproven))
        return name

    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(api, "Client", Client)
    for module in (goodput_module, fabric_module, baselines_module):
        monkeypatch.setattr(module, "open_archives", open_archives)
    for module in (goodput_module, fabric_module):
        monkeypatch.setattr(module, "open_reference", open_reference)
    return seen


def cells(text: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.replace("\u00a0", " ").split("  ") if cell.strip()] for line in text.splitlines()
    ]


# --- goodput ----------------------------------------------------------------------------------------------------------

SECONDS = {"startup": 5.0, "useful": 60.0, "lost": 10.0, "restart": 25.0}
KNOWN = Goodput("a-2", True, 0.6, 100.0, SECONDS, 2, 1, 12.5, 50.0, 10.0, 0.725, 9.0)
UNKNOWN = Goodput("b-2", False, None, 100.0, SECONDS, 0, 0, None, None, None, None, None)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is measured: the runs "a" with faults and "b" without, each with its reference."""
    seen: list[Any] = []

    def measure(archive: Any, reference: Any) -> Goodput:
        seen.append((archive.name, reference))
        return KNOWN if archive.name == "a" else UNKNOWN

    monkeypatch.setattr(goodput_module, "has_faults", lambda archive: archive.name == "a")
    monkeypatch.setattr(goodput_module, "measure_goodput", measure)
    return seen


def test_the_goodput_of_runs_with_faults_is_a_table(measured: list[Any], opened: list[Any], capsys: Captured) -> None:
    goodput(["a", "b"], "base", unproven=True)
    assert opened == [(["a", "b"], True), ("--reference", "base", True)]
    assert measured == [("a", "base")]
    printed = capsys.readouterr()
    assert cells(printed.out) == [
        ["RUN", "GOODPUT", "ETTR", "FAULTS", "RESTARTS", "RECOVERY", "WALL", *(part.upper() for part in PARTS)],
        [
            *("a-2", "60 %", "72 %", "2", "1", "12.5 s", "100 s"),
            *("5.00 s", "60.0 s", "0 s", "0 s", "10.0 s", "0 s", "25.0 s", "0 s"),
        ],
    ]
    assert printed.err == ""


def test_runs_without_faults_are_shown_if_there_are_no_others(
    measured: list[Any], opened: list[Any], capsys: Captured
) -> None:
    goodput(["b", "c"])
    assert opened == [(["b", "c"], False)]
    assert measured == [("b", None), ("c", None)]
    printed = capsys.readouterr()
    assert cells(printed.out)[1][:7] == ["b-2", "–", "–", "0", "0", "–", "100 s"]
    assert printed.err == (
        "Goodput relative to each run's own speed; to compare with a run without faults, use --reference RUN.\n"
    )


def test_goodput_as_a_document(measured: list[Any], capsys: Captured) -> None:
    goodput(["a"], output=Format.json)
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {
        "schema_version": 1,
        "runs": [
            {
                "name": "a-2", "is_referenced": True, "value": 0.6, "wall": 100.0, "parts": SECONDS, "faults": 2,
                "restarts": 1, "recovery": 12.5, "mtbf": 50.0, "interval": 10.0, "ettr": 0.725, "best": 9.0,
            }
        ],
    }  # fmt: skip
    assert printed.err == ""


# --- fabric -----------------------------------------------------------------------------------------------------------

JOB = Job("a-2", "bsp", 2, 400, 0.25, 4e6, 1e9, "1 Gbit/s")


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is reported on."""
    seen: list[Any] = []

    def report_fabric(archives: Any, compute: Any, alone: Any, rate: Any) -> FabricReport:
        seen.append(([archive.name for archive in archives], compute, alone, rate))
        fairness = 0.98765 if len(archives) > 1 else None
        return FabricReport((JOB,) * len(archives), (), (), fairness, ("m1",), ("c-2: it has no network",))

    monkeypatch.setattr(fabric_module, "report_fabric", report_fabric)
    return seen


def test_a_fabric_is_reported_with_its_references(reported: list[Any], opened: list[Any], capsys: Captured) -> None:
    fabric(["a", "b"], "noop-2", "alone-2", "100gbit", unproven=True)
    assert reported == [(["a", "b"], "noop-2", "alone-2", 100e9)]
    assert opened == [(["a", "b"], True), ("--compute", "noop-2", True), ("--alone", "alone-2", True)]
    printed = capsys.readouterr()
    head, first, second = cells(printed.out)
    assert head[:4] == ["RUN", "METHOD", "RANKS", "UPDATE"]
    assert first[:4] == second[:4] == ["a-2", "bsp", "2", "250 ms"]
    assert printed.err.splitlines()[:2] == [
        "Fairness (Jain's index) of 2 runs: 0.988",
        "Left out: c-2: it has no network",
    ]
    assert printed.err.splitlines()[2].startswith("Observed at: class (c), endpoint software; ")
    assert len(printed.err.splitlines()) == 3


def test_one_run_has_no_fairness_and_a_page_is_named(reported: list[Any], tmp_path: Path, capsys: Captured) -> None:
    page = tmp_path / "fabric.md"
    fabric(["a"], page=page)
    assert reported == [(["a"], None, None, None)]
    err = capsys.readouterr().err
    assert "Fairness" not in err
    assert err.endswith(f"\nPage: {page}\n")
    assert "Device under test" in page.read_text()
    fabric(["a"], page=page, output=Format.json)
    printed = capsys.readouterr()
    assert json.loads(printed.out)["results"]["jobs"][0]["run"] == "a-2"
    assert printed.err == ""


@pytest.mark.parametrize(
    ("options", "words"), [({"access_rate": "fast"}, "--access-rate"), ({"page": Path("fabric.pdf")}, "fabric.pdf")]
)
def test_options_of_a_fabric_are_checked_first(
    reported: list[Any], opened: list[Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        fabric(["a"], **options)
    assert opened == []


# --- baselines --------------------------------------------------------------------------------------------------------

BUSBW = Expected("gke/n1", 2, 4, "gloo", "busbw GB/s", 5.0, "a table")
THROUGHPUT = Expected("eks/m7", 4, 4, "nccl", "throughput", 1234.5, "a run", "mnist", "tiny")
REACHED = CheckedFigure(("a-1", "a-2", "a-3", "a-4"), BUSBW, "busbw GB/s", "gke/n1", 4.9, 0.98, Verdict.PASSED)
NEW = CheckedFigure(("b-1",), None, "throughput", "aks/d8", 7.0, None, Verdict.CANNOT_TELL)
MISSED = CheckedFigure(
    *(("c-1",), BUSBW, "busbw GB/s", "gke/n1", 2.5, 0.5, Verdict.FAILED),
    (SlowLink(0, 1, ("m1", "m2"), 4e8, 0.4), SlowLink(1, 2, ("m2", "m3"), 5e8, 0.5)),
)


def test_expected_figures_are_listed_by_machine(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(baselines_module, "list_expected", lambda home: [BUSBW, THROUGHPUT])
    show(SimpleNamespace(invoked_subcommand="check"))  # type: ignore[arg-type]
    assert capsys.readouterr().out == ""
    context: Any = SimpleNamespace(invoked_subcommand=None)
    show(context)
    assert cells(capsys.readouterr().out) == [
        ["MACHINE", "WORKERS", "RANKS", "BACKEND", "FIGURE", "EXPECTED", "SOURCE"],
        ["gke/n1", "2", "4", "gloo", "busbw GB/s", "5.00", "a table"],
        ["eks/m7", "4", "4", "nccl", "throughput of mnist (tiny)", "1234", "a run"],
    ]
    show(context, "n1")
    assert len(capsys.readouterr().out.splitlines()) == 2
    show(context, "eks", Format.json)
    assert json.loads(capsys.readouterr().out) == {"schema_version": 1, "figures": [vars(THROUGHPUT)]}


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets `check` find these figures; the list has the share that is enough."""

    def prepare(*found: CheckedFigure) -> list[float]:
        shares: list[float] = []

        def check_figures(archives: Any, expected: Any, share: float) -> list[CheckedFigure]:
            assert [archive.name for archive in archives] == ["a"]
            shares.append(share)
            return list(found)

        monkeypatch.setattr(baselines_module, "check_figures", check_figures)
        return shares

    return prepare


@pytest.mark.parametrize(
    ("found", "code"),
    [
        ((REACHED,), 0),
        ((REACHED, NEW), 0),  # what nobody expects does not count beside what somebody does
        ((REACHED, MISSED, NEW), 7),
        ((NEW,), 9),
    ],
)
def test_figures_that_are_expected_decide(figures: Any, found: tuple[CheckedFigure, ...], code: int) -> None:
    figures(*found)
    assert check(["a"]) == code


def test_checked_figures_are_a_table_with_the_slow_links(figures: Any, capsys: Captured) -> None:
    figures(REACHED, NEW, MISSED)
    assert check(["a"]) == 7
    assert cells(capsys.readouterr().out) == [
        ["RUNS", "FIGURE", "MEASURED", "EXPECTED", "SHARE", "VERDICT"],
        ["a-1, a-2, a-3", "busbw GB/s", "4.90", "5.00", "98 %", "passed"],
        ["b-1", "throughput", "7.00", "–", "–", "no baseline for this machine"],
        ["c-1", "busbw GB/s", "2.50", "5.00", "50 %", "failed"],
        ["Slow link: rank 0 (m1) to rank 1 (m2): 400 Mbit/s, 40 % of the median."],
        ["Slow link: rank 1 (m2) to rank 2 (m3): 500 Mbit/s, 50 % of the median."],
        ["All slow links involve m2."],
    ]


def test_checked_figures_as_a_document(figures: Any, capsys: Captured) -> None:
    shares = figures(MISSED)
    assert check(["a"], 80.0, Format.json) == 7
    assert shares == [0.8]
    assert json.loads(capsys.readouterr().out) == {
        "schema_version": 1,
        "at_least": 0.8,
        "checks": json.loads(json.dumps([MISSED.to_dict()])),
    }


@pytest.mark.parametrize(("at_least", "is_valid"), [(0.0, False), (0.1, True), (1000.0, True), (1000.1, False)])
def test_the_share_that_is_enough_is_a_percentage(figures: Any, at_least: float, is_valid: bool) -> None:
    shares = figures(REACHED)
    if is_valid:
        assert check(["a"], at_least) == 0
        assert shares == [at_least / 100]
    else:
        with pytest.raises(UsageError, match="a percentage above 0 is needed") as caught:
            check(["a"], at_least)
        assert caught.value.hint == "--at-least 95"


def test_results_of_which_nothing_counts_are_refused(figures: Any) -> None:
    shares = figures()
    with pytest.raises(UsageError) as caught:
        check(["a"])
    assert caught.value.hint == "mlbench run NAME 2 --task allreduce"
    assert shares == [0.95]  # as the help says


def test_recorded_figures_are_shown(monkeypatch: pytest.MonkeyPatch, capsys: Captured, tmp_path: Path) -> None:
    homes: list[Path] = []

    def record_expected(home: Path, archives: Any) -> list[Expected]:
        assert [archive.name for archive in archives] == ["a"]
        homes.append(home)
        return [BUSBW]

    monkeypatch.setattr(baselines_module, "record_expected", record_expected)
    record(["a"])
    assert cells(capsys.readouterr().out)[1] == ["gke/n1", "2", "4", "gloo", "busbw GB/s", "5.00", "a table"]
    record(["a"], Format.json)
    assert json.loads(capsys.readouterr().out)["figures"] == [vars(BUSBW)]
    assert homes == [tmp_path / "home"] * 2
