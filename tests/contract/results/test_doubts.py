"""What the judge doubts, what failed, and what happened to the ranks counts in every command that presents results."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.app import run
from mlbench_cli.results.archive.files import pack
from mlbench_cli.results.archive.record import write_run_document
from mlbench_cli.results.archive.seal import seal
from mlbench_cli.storage import run_folder
from mlbench_cli.util.json_text import format_document
from tests.unit.results.runs import event, new_run, observation_of, sealed_run, spec, training_log

Captured = pytest.CaptureFixture[str]
pytestmark = pytest.mark.usefixtures("home")


def doubted(folder: Path, name: str, seconds: float) -> str:
    """A run whose log has an event of a day before it started."""
    logs = {rank: training_log(rank, seconds) for rank in range(2)}
    logs[1].append(event("metric", 1, -86400.0, name="x", value=1.0))
    made = new_run(folder / name, spec(name), logs)
    write_run_document(made)
    seal(made, observation_of(2, seconds + 3))
    assert json.loads((folder / name / "result.json").read_text())["doubts"] == ["implausible_event_times"]
    return str(folder / name)


def honest(folder: Path, name: str, seconds: float, **changes: Any) -> str:
    return str(sealed_run(folder / name, name=name, seconds=seconds, **changes))


def show(capsys: Captured, words: Sequence[str], code: int) -> str:
    capsys.readouterr()
    assert run([*words]) == code, capsys.readouterr()
    out, err = capsys.readouterr()
    return out + err


def test_doubted_results_pass_no_gate_and_have_no_figures(tmp_path: Path, capsys: Captured) -> None:
    slow = [honest(tmp_path, f"slow-{n}", 100.0 + n) for n in range(3)]
    fast = [doubted(tmp_path, f"fast-{n}", 10.0 + n) for n in range(3)]
    (tmp_path / "base").mkdir()
    for path in slow:
        pack(Path(path), tmp_path / "base" / f"{Path(path).name}.zip")
    shown = show(capsys, ["gate", *fast, "--baseline", "base", "--bencher", "b.json"], 9)
    assert "in doubt (implausible_event_times)" in shown
    assert "10" not in Path("b.json").read_text()
    assert "in doubt" in show(capsys, ["compare", slow[0], fast[0]], 0)
    assert "in doubt" in show(capsys, ["reproduce", fast[0], "--with", slow[0]], 2)
    shown = show(capsys, ["reproduce", *slow, *(word for path in fast for word in ("--with", path)), "-o", "json"], 9)
    assert json.loads(shown[: shown.rindex("}") + 1])["figures"][0]["reproduction"] == []
    show(capsys, ["report", "out.md", slow[0], *fast], 0)
    page = Path("out.md").read_text()
    assert "the evidence is in doubt" in page
    assert "10 s" not in page.split("## ")[0]


def test_how_long_a_failure_took_is_no_figure(tmp_path: Path, capsys: Captured) -> None:
    good = [honest(tmp_path, f"good-{n}", 100.0 + n) for n in range(3)]
    failed = str(sealed_run(tmp_path / "bad", "failed", name="bad-2", seconds=7.0))
    (tmp_path / "base").mkdir()
    for path in good:
        pack(Path(path), tmp_path / "base" / f"{Path(path).name}.zip")
    words = ["gate", failed, "--baseline", "base", "--action-benchmark", "bench", "--bencher", "b.json"]
    assert "bad-2 ended as failed" in show(capsys, words, 7)
    assert json.loads(Path("bench/smaller-is-better.json").read_text()) == []
    assert json.loads(Path("b.json").read_text()) == {}


@pytest.mark.parametrize(("ours", "theirs", "code"), [(True, True, 0), (False, True, 9), (True, False, 9)])
def test_conditions_have_to_be_the_same_on_both_sides(
    tmp_path: Path, capsys: Captured, ours: bool, theirs: bool, code: int
) -> None:
    def make(name: str, seconds: float, is_shared: bool) -> str:
        return honest(tmp_path, name, seconds, share_machine=is_shared)

    new = [make(f"new-{n}", 100.0 + n, ours) for n in range(3)]
    (tmp_path / "base").mkdir()
    for n in range(3):
        pack(Path(make(f"old-{n}", 100.5 + n, theirs)), tmp_path / "base" / f"{n}.zip")
    shown = show(capsys, ["gate", *new, "--baseline", "base"], code)
    assert ("The conditions differ" in " ".join(shown.split())) is (ours != theirs)
    show(capsys, ["gate", *new, "--baseline", "base", "--across", "conditions"], 0)


def test_restarted_runs_and_other_clusters_are_not_repeats(tmp_path: Path, capsys: Captured) -> None:
    runs = []
    for name, attempts in (("calm-2", 1), ("rough-2", 3)):
        logs = {rank: training_log(rank) for rank in (0, 1)}
        for step, cost in enumerate((0.1, 0.3), 1):
            logs[0].insert(1, event("metric", at=30.0, name="checkpoint_seconds", value=cost, step=step))
        made = new_run(tmp_path / name, spec(name, on_failure="restart"), logs)
        times = [
            {"started": 30.0 * n, "training": 30.0 * n + 1, "ended": 30.0 * (n + 1), "ranks": 2}
            for n in range(attempts)
        ]
        record: dict[str, Any] = {"script": None, "seed": 42, "policy": "restart", "began": 1.76e9, "ended": 100.0}
        record |= {"attempts": times, "events": []}
        (tmp_path / name / run_folder.FAULTS).write_bytes(format_document(record))
        write_run_document(made)
        seal(made, observation_of(2))
        runs.append(str(tmp_path / name))
        assert json.loads((tmp_path / name / "result.json").read_text())["faults"]["checkpoint_seconds"] == 0.2
    assert "interruptions differ" in show(capsys, ["compare", *runs], 0)
    show(capsys, ["report", "out.html", *runs], 0)
    page = Path("out.html").read_text()
    assert re.findall(r'<td data-label="restarts"[^>]*>(.+?)</td>', page) == ["0", "2"]
    assert re.findall(r'<td data-label="recovery"[^>]*>(.+?)</td>', page) == ["–", "30.0\N{NO-BREAK SPACE}s"]
    slurm = {"engine": "slurm", "cluster_kind": "slurm/debug"}
    here = honest(tmp_path, "here-2", 100.0, cluster="physics", **slurm)
    there = honest(tmp_path, "there-2", 101.0, cluster="biology", **slurm)
    assert "kinds of cluster differ: slurm/debug physics and slurm/debug biology" in " ".join(
        show(capsys, ["compare", here, there], 0).split()
    )


def test_no_winner_is_named_across_clusters(tmp_path: Path, capsys: Captured) -> None:
    for number in range(3):
        honest(
            tmp_path, f"here-{number}", 100.0 + number, cluster="physics", engine="slurm", cluster_kind="slurm/debug"
        )
        method = {"name": "powersgd"}
        honest(
            tmp_path,
            f"away-{number}",
            10.0 + number,
            cluster="b",
            engine="slurm",
            cluster_kind="slurm/x",
            method=method,
        )
    show(capsys, ["report", "out.md", *(str(path) for path in sorted(tmp_path.glob("[ha][ew]*-?")))], 0)
    head = Path("out.md").read_text().split("## ")[0]
    assert "No verdict" in head
    assert "The kinds of cluster differ" in head
    assert "faster than" not in head
    assert "Too few runs" not in head
