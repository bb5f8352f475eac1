"""How runs ended: the table, the document of `-o json`, the reasons on stderr, and what to do next."""

import json
from pathlib import Path
from typing import Any, cast

import pytest

from mlbench_cli.commands._report import Ended, Unanswered, report_ended
from mlbench_cli.console import Format
from mlbench_cli.errors import DamagedArchive, UnreachableError
from mlbench_cli.model.run import Finding, Outcome, Run
from mlbench_cli.runs.finished import FinishedRun
from tests.unit.results.runs import spec

Captured = pytest.CaptureFixture[str]
OPEN = {"word": "open", "reason": "another batch size"}
NETWORK: dict[str, Any] = {
    "asked": "1gbit", "rtt_seconds": None, "together_bits_per_second": 9.7e8, "alone_bits_per_second": None,
    "networks": 1, "method": "netns", "held": True, "problems": [],
}  # fmt: skip


def result(**changes: Any) -> dict[str, Any]:
    goal = {"metric": "Prec@1", "comparison": ">=", "threshold": 80.0, "value": 80.5, "last": 79.0, "reached": True}
    return {
        "goal": goal,
        "task_seconds": {"wall": 6.17},
        "wall_seconds": 65.0,
        "division": {"word": "closed", "reason": None},
        "conditions": None,
        "network": None,
        **changes,
    }


def crowded(reason: str) -> dict[str, Any]:
    return {"labels": ["shared_machine"], "shared_machine": {"reason": reason}}


def make_run(folder: Path, name: str = "demo-2", workers: int = 2) -> Run:
    return Run("f00d", spec(name, workers), folder / name, "2026-01-01T00:00:00.000Z")


def ended(
    folder: Path,
    name: str = "demo-2",
    outcome: Outcome = Outcome.GOAL_REACHED,
    findings: tuple[Finding, ...] = (),
    document: dict[str, Any] | None = None,
) -> Ended:
    """A run whose folder exists; `document` {} stands for an archive that could not be completed."""
    run = make_run(folder, name, int(name[-1]))
    run.folder.mkdir()
    document = result() if document is None else document
    finished = FinishedRun(run, outcome, f"{name} {outcome.phrase}.", findings, cast(Any, document or None))
    return Ended(finished, finished.exit_code())


def shown(captured: Captured, *runs: Ended, unanswered: tuple[Unanswered, ...] = ()) -> tuple[list[str], list[str]]:
    """The lines on stdout and on stderr."""
    report_ended(runs, Format.text, (), unanswered)
    printed = captured.readouterr()
    return printed.out.splitlines(), printed.err.splitlines()


def test_the_document_of_runs_that_have_ended(tmp_path: Path, capsys: Captured) -> None:
    crash = Finding("rank_crashed", "Rank 0 crashed.", "mlbench logs demo-2", evidence={"rank": 0})
    failed = ended(tmp_path, outcome=Outcome.FAILED, findings=(crash,))
    silent = Unanswered(make_run(tmp_path, "demo-4", 4), UnreachableError("No answer.", hint="Wait."))
    damaged = Unanswered(make_run(tmp_path, "demo-8", 8), DamagedArchive(Path("a"), "result.json", "changed"))
    report_ended([failed], Format.json, (), [silent, damaged])
    assert json.loads(capsys.readouterr().out) == {
        "schema_version": 1,
        "runs": [
            {
                "name": "demo-2",
                "outcome": "failed",
                "exit_code": 7,
                "summary": "demo-2 failed.",
                "findings": [
                    {
                        "code": "rank_crashed",
                        "summary": "Rank 0 crashed.",
                        "hint": "mlbench logs demo-2",
                        "retryable": False,
                        "permanent": False,
                        "evidence": {"rank": 0},
                    }
                ],
                "folder": str(tmp_path / "demo-2"),
                "result": result(),
            },
            {
                "name": "demo-4",
                "outcome": "unknown",
                "exit_code": 10,
                "summary": "No answer.",
                "findings": [],
                "folder": str(tmp_path / "demo-4"),
                "result": None,
            },
            {
                "name": "demo-8",
                "outcome": "damaged",
                "exit_code": 2,
                "summary": damaged.error.message,
                "findings": [],
                "folder": str(tmp_path / "demo-8"),
                "result": None,
            },
        ],
    }


def test_the_table_has_each_run_with_its_figures(tmp_path: Path, capsys: Captured) -> None:
    spent = ended(tmp_path, "spent-1", Outcome.BUDGET_SPENT)
    unsealed = ended(tmp_path, "disk-2", Outcome.COMPLETED, document={})
    silent = Unanswered(make_run(tmp_path, "lost-4", 4), UnreachableError("No answer."))
    lines, _ = shown(capsys, ended(tmp_path), spent, unsealed, unanswered=(silent,))
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]
    assert cells == [
        ["RUN", "WORKERS", "OUTCOME", "GOAL", "TIME", "TOTAL", "EXIT"],
        ["demo-2", "2", "goal_reached", "Prec@1 80.5 % (>= 80)", "6.17 s", "1 min 5 s", "0"],
        ["spent-1", "1", "budget_spent", "Prec@1 79.0 % (>= 80)", "6.17 s", "1 min 5 s", "0"],
        ["disk-2", "2", "completed", "-", "-", "-", "8"],
        ["lost-4", "4", "unknown", "-", "-", "-", "10"],
    ]


def test_a_successful_run_names_its_archive_and_the_next_command(tmp_path: Path, capsys: Captured) -> None:
    _, lines = shown(capsys, ended(tmp_path))
    assert lines == [f"Archive: {tmp_path / 'demo-2'}", "Next: mlbench report OUT.html demo-2"]


def test_several_successful_runs_can_be_compared(tmp_path: Path, capsys: Captured) -> None:
    _, lines = shown(capsys, *(ended(tmp_path, f"demo-{size}") for size in (1, 2, 4)))
    assert lines == [
        f"Archives of 3 runs: {tmp_path}",
        "Next: mlbench report OUT.html demo-1 demo-2, mlbench compare demo-1 demo-2",
    ]


def test_a_run_without_an_archive_or_folder_names_none(tmp_path: Path, capsys: Captured) -> None:
    gone = ended(tmp_path, "gone-1")
    gone.finished.run.folder.rmdir()
    _, lines = shown(capsys, gone, ended(tmp_path, "disk-2", Outcome.COMPLETED, document={}))
    assert lines == ["disk-2 completed.", "Warning: gone-1 has been deleted.", "Next: mlbench logs disk-2"]


def test_a_failed_run_has_its_reason_the_end_of_its_log_and_each_hint_once(tmp_path: Path, capsys: Captured) -> None:
    log = ["one", "two", "three", "four"]
    crash = Finding("rank_crashed", "Rank 0 crashed.", "mlbench logs demo-2", evidence={"log": log})
    again = Finding("rank_crashed", "Rank 1 crashed.", "mlbench logs demo-2")
    said = Finding("failed", "demo-2 failed.")
    _, lines = shown(capsys, ended(tmp_path, outcome=Outcome.FAILED, findings=(crash, again, said)))
    assert lines == [
        *("demo-2 failed.", "  Rank 0 crashed.", "  | two", "  | three", "  | four", "  Rank 1 crashed."),
        *(f"Archive: {tmp_path / 'demo-2'}", "Next: mlbench logs demo-2"),
    ]


def test_a_finding_of_a_successful_run_is_told_without_its_log(tmp_path: Path, capsys: Captured) -> None:
    slow = Finding("straggler", "Rank 1 was slow.", "Look at it.", evidence={"log": ["one"]})
    _, lines = shown(capsys, ended(tmp_path, findings=(slow,)))
    assert lines[:2] == ["demo-2 reached its goal.", "  Rank 1 was slow."]
    assert lines[2:] == [f"Archive: {tmp_path / 'demo-2'}", "Next: mlbench report OUT.html demo-2"]


def test_without_a_hint_the_log_of_the_first_failed_run_is_next(tmp_path: Path, capsys: Captured) -> None:
    runs = [ended(tmp_path, f"demo-{size}", Outcome.FAILED) for size in (2, 4)]
    _, lines = shown(capsys, ended(tmp_path, "demo-1"), *runs)
    assert [line for line in lines if line.startswith("Next")] == ["Next: mlbench logs demo-2"]


def test_facts_of_one_run_are_told_without_its_name(tmp_path: Path, capsys: Captured) -> None:
    facts = result(conditions=crowded("another run"), division=OPEN, network=NETWORK)
    _, lines = shown(capsys, ended(tmp_path, document=facts))
    assert lines[:3] == [
        "network between the ranks: emulated 1gbit (got 970 Mbit/s)",
        "open division: another batch size",
        "shared-machine: another run",
    ]


@pytest.mark.parametrize(
    ("count", "names"),
    [(2, "demo-1, demo-2"), (3, "demo-1, demo-2, demo-3"), (4, "demo-1, demo-2, demo-3 and 1 more")],
)
def test_a_fact_of_several_runs_is_told_once_with_three_names(
    tmp_path: Path, capsys: Captured, count: int, names: str
) -> None:
    runs = [ended(tmp_path, f"demo-{size}", document=result(division=OPEN)) for size in range(1, count + 1)]
    _, lines = shown(capsys, *runs)
    assert lines[0] == f"open division: another batch size ({names})"


def test_different_reasons_are_told_apart(tmp_path: Path, capsys: Captured) -> None:
    reasons = {"demo-1": "a compiler", "demo-2": "a browser"}
    runs = [ended(tmp_path, name, document=result(conditions=crowded(why))) for name, why in reasons.items()]
    _, lines = shown(capsys, *runs)
    assert lines[:2] == ["shared-machine: a compiler (demo-1)", "shared-machine: a browser (demo-2)"]
