"""Sealing: what an archive holds, that it is whole or not sealed, and that it claims only what the logs show."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlbench_cli.errors import DamagedArchive, UsageError
from mlbench_cli.model.run import Ending, Finding, Observation, WorkerState
from mlbench_cli.results.archive.files import Archive, pack
from mlbench_cli.results.archive.seal import seal
from mlbench_cli.results.archive.verify import find_problems
from mlbench_cli.storage.run_folder import RunFolder
from tests import NIGHTLY
from tests.contract.clients import start_fork
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
    text = (sealed_run(tmp_path / "run") / "environment.json").read_text()
    assert "OMP_NUM_THREADS" in text
    assert "REGISTRY_TOKEN" not in text
    assert "hush" not in text


def test_coreutils_check_the_sums(tmp_path: Path) -> None:
    folder = sealed_run(tmp_path / "run")
    check = ["sha256sum", "--strict", "--quiet", "-c", "SHA256SUMS"]
    assert subprocess.run(check, cwd=folder, check=False).returncode == 0
    (folder / "metrics.jsonl").write_bytes(b"")
    assert subprocess.run(check, cwd=folder, check=False, capture_output=True).returncode == 1


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


@pytest.mark.parametrize(
    ("log", "codes", "sealed", "findings"),
    [
        (training_log(outcome="goal_missed"), [0, 0], "goal_missed", []),
        (training_log()[:-1], [0, 0], "completed", []),
        ([result_event()], [0, 0], "goal_missed", ["goal_not_proved"]),
        ([line.replace("80.5,", "79.5,") for line in training_log()], [0, 0], "goal_missed", ["goal_not_proved"]),
        (training_log(), [0, 1], "failed", []),
    ],
    ids=["missed", "no result event", "no metric", "below the threshold", "a rank failed"],
)
def test_a_goal_that_is_not_proved_is_not_reached(
    tmp_path: Path, log: list[str], codes: list[int], sealed: str, findings: list[str]
) -> None:
    run = new_run(tmp_path / "run", logs={0: log, 1: []})
    assert seal(run, observation_of(exit_codes=codes)).outcome == sealed
    archive = Archive.open(run.folder)
    assert archive.result["outcome"] == sealed
    assert archive.result["official_line"] is None
    assert [finding["code"] for finding in archive.findings] == findings
    assert find_problems(run.folder) == []


def test_catalog_task_must_report_the_goal_that_was_asked_for(tmp_path: Path) -> None:
    easy = {"metric": "Perplexity", "comparison": "<=", "threshold": 9999.0, "kind": "full", "value": 500.0}
    log = [event("metric", name="val_global_Perplexity", value=500.0), result_event(goal=easy)]
    asked = spec(task="wikitext2_awd_lstm", parameters={"goal_full": 70.0, "goal_light": 100.0})
    run = new_run(tmp_path / "run", asked, {0: log, 1: []})
    assert seal(run, observation_of()).outcome == "goal_missed"
    archive = Archive.open(run.folder)
    assert archive.findings[0]["code"] == "goal_differs"
    goal = archive.result["goal"]
    assert goal is not None
    assert goal["wording"] == "Validation Perplexity of 70"


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


def test_packing_refuses_what_was_changed_after_sealing(tmp_path: Path) -> None:
    folder = sealed_run(tmp_path / "run")
    (folder / "logs" / "rank-1.log").write_text("nothing to see")
    with pytest.raises(DamagedArchive, match=r"rank-1\.log"):
        pack(folder, tmp_path / "run.zip")
    assert not (tmp_path / "run.zip").exists()


@pytest.mark.parametrize("stride", [1 if NIGHTLY else 23])
def test_killed_at_every_step_then_sealed_again(tmp_path: Path, stride: int) -> None:
    steps = _seal_in_child(tmp_path / "whole", die_at=None)
    assert steps > 30
    for step in range(1, steps + 1, stride):
        folder = tmp_path / f"step-{step}"
        _seal_in_child(folder, die_at=step)
        _seals_after_crash(folder)


@pytest.mark.slow
def test_killed_at_random_moments_then_sealed_again(tmp_path: Path) -> None:
    chance = random.Random(7)

    def seal_there() -> None:
        run = _large_run(folder)
        print(flush=True)
        seal(run, observation_of())

    for attempt in range(3):
        folder = tmp_path / str(attempt)
        with start_fork(seal_there, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            child.stdout.readline()
            time.sleep(chance.uniform(0, 0.2))
            child.send_signal(signal.SIGKILL)
        _seals_after_crash(folder)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
RESULTS = st.fixed_dictionaries(
    {"outcome": st.sampled_from(("goal_reached", "goal_missed", "completed")) | JSON},
    optional={
        "goal": JSON
        | st.fixed_dictionaries(
            {
                "metric": st.sampled_from(("Prec@1", "loss", "\n")) | JSON,
                "comparison": st.sampled_from((">=", "<=")),
                "threshold": st.sampled_from((80, 80.0, 1e308)) | st.floats(),
                "kind": st.sampled_from(("full", "light")) | JSON,
                "value": st.sampled_from((80, 80.5, 1)) | st.floats() | st.integers(),
            }
        ),
        "wall_seconds": st.floats() | JSON,
        "training_seconds": st.floats() | JSON,
        "timings": st.dictionaries(
            st.text(max_size=8),
            st.fixed_dictionaries(dict.fromkeys(("min", "mean", "max", "rank0"), st.floats())) | JSON,
        ),
        **dict.fromkeys(("updates", "samples", "epochs", "synthetic", "data", "details"), JSON),
    },
)
METRICS = st.fixed_dictionaries(
    {"name": st.sampled_from(("Prec@1", "val_Prec@1", "loss")) | JSON, "value": st.sampled_from((80, 80.5)) | JSON},
    optional=dict.fromkeys(("epoch", "step", "unit", "seconds"), JSON),
)
LINES = st.lists(
    st.tuples(st.just("result"), RESULTS)
    | st.tuples(st.just("metric"), METRICS)
    | st.tuples(st.just("environment"), st.dictionaries(st.text(max_size=5), JSON, max_size=3))
    | st.tuples(st.just("text"), st.text(max_size=30)),
    max_size=6,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=LINES,
    ending=st.sampled_from([*Ending]),
    codes=st.lists(st.sampled_from((0, 0, 1, None)), min_size=2, max_size=2),
)
def test_whatever_a_task_reports_the_archive_verifies(
    tmp_path_factory: pytest.TempPathFactory, lines: list[tuple[str, Any]], ending: Ending, codes: list[int | None]
) -> None:
    log = []
    for kind, content in lines:
        if kind == "text":
            log.append(content.replace("\n", "").replace("\r", "").encode("utf-8", "replace").decode())
            continue
        record = {**content, "v": 1, "event": kind, "rank": 0, "time": START}
        log.append("@mlbench " + json.dumps(record))  # with NaN and Infinity, as other languages may write them
    run = new_run(tmp_path_factory.mktemp("any") / "run", logs={0: log})
    seal(run, observation_of(exit_codes=codes, ended=ending))
    assert find_problems(run.folder) == []


def _large_run(folder: Path):  # type: ignore[no-untyped-def]
    lines = [event("metric", at=index, name="train_loss", value=index / 7) for index in range(8_000)]
    return new_run(folder, logs={0: [*lines, *training_log()], 1: training_log(1)})


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
