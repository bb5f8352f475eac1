"""Sealing: what an archive holds, that it is whole or not sealed, and that it claims only what the logs show."""

import os
import signal
import sys
from pathlib import Path

import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.model.run import Ending, Finding, NodeClock, Observation, WorkerState
from mlbench_cli.results.archive.files import Archive, pack
from mlbench_cli.results.archive.seal import seal
from mlbench_cli.results.archive.verify import find_problems
from mlbench_cli.storage.run_folder import RunFolder
from tests import NIGHTLY
from tests.unit.results.runs import (
    START,
    event,
    new_run,
    observation_of,
    result_event,
    sealed_run,
    spec,
    training_log,
)


def test_names_that_no_system_may_take_for_others_are_sealed(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    output = run.folder / "output" / "rank-0"
    output.mkdir(parents=True)
    for name in ("log.txt", "Log.txt", "con.txt", "12:30.csv", "end.", "\u202egpj.exe"):
        (output / name).write_text(name)
    (run.folder / "README.html").write_text("not the run's")
    judgement = seal(run, observation_of())
    assert find_problems(run.folder) == []
    kept = sorted(path.name for path in output.iterdir())
    assert kept == ["%63on.txt", "%E2%80%AEgpj.exe", "12%3A30.csv", "Log.txt", "end%2E"]
    (renamed,) = (run.folder / "output").glob("renamed-*")
    assert renamed.read_text() == "log.txt"
    codes = [finding.code for finding in judgement.findings]
    assert sorted(codes) == ["file_left_out", *["file_renamed"] * 5]


def test_archive_holds_what_was_reported(tmp_path: Path) -> None:
    archive = Archive.open(sealed_run(tmp_path / "run"))
    assert archive.names == (
        *("SHA256SUMS", "environment.json", "findings.json", "logs/rank-0.log", "logs/rank-1.log", "metrics.jsonl"),
        *("observation.json", "official_result.txt", "resources.jsonl", "result.json", "run.json"),
    )
    result = archive.result
    assert result["outcome"] == "goal_reached"
    assert result["goal"] == {
        "metric": "Prec@1",
        "comparison": ">=",
        "threshold": 80.0,
        "kind": "full",
        "value": 80.5,
        "last": None,
        "wording": "Prec@1 >= 80",
        "reached": True,
        "seconds": {"wall": 100.0, "training": 86.0},
    }
    assert (result["started"], result["finished"]) == ("2025-10-09T08:53:20.000Z", "2025-10-09T08:55:03.000Z")
    assert (result["wall_seconds"], result["updates"], result["price"]) == (103.0, 400, None)
    assert result["worker_states"][1]["finished"] == "2025-10-09T08:55:03.000Z"
    metrics = list(archive.metrics())
    assert [metric["rank"] for metric in metrics] == [0] * 9 + [1] * 6
    assert metrics[2] == {
        "rank": 0,
        "time": "2025-10-09T08:53:53.333Z",
        "name": "val_Prec@1",
        "value": 40.0,
        "epoch": 0,
        "seconds": 100 / 3,
        "unit": "%",
    }
    assert archive.environment["ranks"]["1"]["framework"] == "torch"
    assert find_problems(tmp_path / "run") == []


@pytest.mark.parametrize(("each", "amount"), [(3.5, 0.1001), (None, None)])
def test_the_price_is_what_the_run_was_recorded_with(tmp_path: Path, each: float | None, amount: float | None) -> None:
    price = {"per_hour": each, "currency": "USD", "source": "a table of that day"}
    folder = sealed_run(tmp_path / "run", price=price)
    assert Archive.open(folder).result["price"] == {**price, "amount": amount}
    assert find_problems(folder) == []


def test_environment_keeps_no_secret_variables(tmp_path: Path) -> None:
    more = {"variables": {"REGISTRY_PASSWORD": "hush"}}
    text = (sealed_run(tmp_path / "run", environment=more) / "environment.json").read_text()
    assert "OMP_NUM_THREADS" in text
    assert "REGISTRY_" not in text
    assert "hush" not in text


def test_an_anonymous_run_names_no_machine(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", spec(anonymous=True))
    seal(run, observation_of(clocks=(NodeClock("this-host", 0.0),)))
    assert "this-host" not in (run.folder / "observation.json").read_text()


def test_sealing_again_changes_nothing(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    seal(run, observation_of())
    before = {path: path.stat().st_mtime_ns for path in run.folder.iterdir() if path.is_file()}
    with pytest.raises(UsageError, match="complete already"):
        seal(run, observation_of(exit_codes=[1, 1]))
    assert {path: path.stat().st_mtime_ns for path in run.folder.iterdir() if path.is_file()} == before


def test_run_that_never_wrote_anything(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", logs={})
    seen = Observation(
        START + 60, (WorkerState(0), WorkerState(1)), (Finding("unschedulable", "no room"),), Ending.NEVER_STARTED
    )
    assert seal(run, seen).outcome == "never_started"
    archive = Archive.open(run.folder)
    assert find_problems(run.folder) == []
    assert archive.findings[0]["code"] == "unschedulable"
    assert (archive.result["started"], archive.result["wall_seconds"]) == (None, None)
    assert archive.read("official_result.txt") == b"No official result: the run never started.\n"


def test_custom_task_that_reports_nothing(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", spec(task="custom"), {0: ["hello"], 1: []})
    assert seal(run, observation_of()).outcome == "completed"
    assert find_problems(run.folder) == []
    assert Archive.open(run.folder).read("official_result.txt") == (
        b"No official result: the run completed, and it has no goal.\n"
    )


def test_only_the_last_result_of_rank_0_counts(tmp_path: Path) -> None:
    foreign = event("result", rank=1, outcome="goal_missed")
    broken = event("result", outcome="splendid")
    log = [result_event(seconds=5.0), *training_log(), foreign, broken, "@mlbench {not json", event("result", rank=7)]
    run = new_run(tmp_path / "run", logs={0: log, 1: [result_event(seconds=1.0)]})
    seal(run, observation_of())
    assert Archive.open(run.folder).result["task_seconds"]["wall"] == 100.0


def test_events_of_ranks_that_do_not_exist_are_left_out(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", logs={0: [*training_log(), event("metric", rank=2, name="loss", value=1)]})
    seal(run, observation_of())
    assert {metric["rank"] for metric in Archive.open(run.folder).metrics()} == {0}


def test_files_that_no_archive_can_hold(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    output = run.folder / "output" / "rank-0"
    (output / "closed").mkdir(parents=True)
    (output / "model.pt").write_bytes(b"weights")
    (output / "latest").symlink_to("model.pt")
    (output / "two\nlines").write_text("a")
    (output / ".hidden").write_text("b")
    (output / "a\\b").write_text("c")
    os.mkfifo(output / "pipe")
    with open(os.fsencode(output) + b"/\xff.txt", "w") as file:
        file.write("d")
    (output / "closed" / "mine").write_text("e")
    (output / "closed" / "mine").chmod(0)
    (output / "closed").chmod(0)
    seal(run, observation_of())
    names = [
        name.removeprefix("output/rank-0/") for name in Archive.open(run.folder).names if name.startswith("output")
    ]
    assert names == ["%FF.txt", ".hidden", "a%5Cb", "closed/mine", "model.pt", "two%0Alines"]
    assert find_problems(run.folder) == []
    codes = [finding["code"] for finding in Archive.open(run.folder).findings]
    assert sorted(codes) == ["file_left_out"] * 2 + ["file_renamed"] * 3
    pack(run.folder, tmp_path / "run.zip")
    assert find_problems(tmp_path / "run.zip") == []


def test_torn_resource_lines_are_mended(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    (run.folder / "resources.jsonl").write_text(f'{{"time":{START},"rank":0,"rss_bytes":5}}\n\n{{"time":1,"ra')
    seal(run, observation_of())
    assert list(Archive.open(run.folder).resources()) == [
        {"time": "2025-10-09T08:53:20.000Z", "rank": 0, "rss_bytes": 5}
    ]


def test_long_lines_and_many_lines_need_little_memory(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    with open(run.folder / "logs" / "rank-0.log", "ab") as log:
        log.write(b"@mlbench {" + b"x" * (120 << 20))
    assert _within(60 << 20, lambda: seal(run, observation_of()))
    assert Archive.open(run.folder).result["outcome"] == "goal_reached"


def test_an_unwritable_folder_is_named(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    (run.folder / "metrics.jsonl").mkdir()
    with pytest.raises(Exception, match="cannot be sealed"):
        seal(run, observation_of())


@pytest.mark.parametrize("stride", [1 if NIGHTLY else 23])
def test_killed_at_every_step_then_sealed_again(tmp_path: Path, stride: int) -> None:
    steps = _seal_in_child(tmp_path / "whole", die_at=None)
    assert steps > 30
    for step in range(1, steps + 1, stride):
        folder = tmp_path / f"step-{step}"
        _seal_in_child(folder, die_at=step)
        _seals_after_crash(folder)


def _seals_after_crash(folder: Path) -> None:
    found = find_problems(folder)
    if RunFolder(folder).is_sealed:
        assert found == []
        return
    assert [problem.code for problem in found] == ["unsealed"]
    run_spec = spec()
    from mlbench_cli.model.run import Run

    run = Run("0123456789ab", run_spec, folder, "2025-10-09T08:53:19.000Z")
    assert seal(run, observation_of()).outcome == "goal_reached"
    assert find_problems(folder) == []
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def _seal_in_child(folder: Path, die_at: int | None) -> int:
    """Seal in a forked process that kills itself at its nth step on files; the number of steps it took."""
    run = new_run(folder)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        steps = 0

        def step(name: str, _: object) -> None:
            nonlocal steps
            if name in ("open", "os.rename", "os.remove", "os.mkdir", "os.scandir"):
                steps += 1
                if steps == die_at:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(step)
        seal(run, observation_of())
        os.write(writer, str(steps).encode())
        os._exit(0)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    with open(reader) as answer:
        text = answer.read()
    assert os.WIFSIGNALED(status) == (die_at is not None)
    return int(text or 0)


def _within(extra: int, action) -> bool:  # type: ignore[no-untyped-def]
    """Whether a forked process does `action` with at most `extra` bytes of address space on top of what it has."""
    import resource

    child = os.fork()
    if child == 0:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + extra
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def test_output_that_is_nested_too_deeply_is_left_out_by_name(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    (tmp_path / "run" / "output" / "rank-0").mkdir(parents=True)
    here = os.open(tmp_path / "run" / "output" / "rank-0", os.O_RDONLY)
    for _ in range(60):  # 6,000 characters, which no path can have
        os.mkdir("d" * 100, dir_fd=here)
        inner = os.open("d" * 100, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    found = seal(run, observation_of())
    assert [finding.code for finding in found.findings] == ["file_left_out"]
    assert len(found.findings[0].summary) < 200
    assert find_problems(tmp_path / "run") == []
