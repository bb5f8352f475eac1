"""What a failed process means, by its exit code and its last lines; and how local runs ended, from facts alone."""

from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.engines.crashes import (
    describe_peak,
    describe_signal,
    explain_exit,
    explain_gpu_memory,
    last_lines,
)
from mlbench_cli.engines.local.diagnosis import describe_exit, diagnose, read_last_lines
from mlbench_cli.model.run import Finding
from task_images.contract import format_event

# --- exit codes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "how", "kind", "summary", "retryable"),
    [
        (64, "exited with 64", "usage", "Rank 3 rejected its arguments: no such data (exit code 64).", False),
        (78, "exited with 78", "bad_environment", "Rank 3 cannot run in this environment: no such data", False),
        (75, "exited with 75", "retryable", "Rank 3 failed for a reason that may be temporary (exit code 75).", True),
        (
            70,
            "exited with 70",
            "wrong_result",
            "A check on rank 3 found that communication between ranks gives wrong results (exit code 70).",
            False,
        ),
        (1, "exited with 1", "rank_crashed", "Rank 3 exited with 1.", False),
        (139, "was killed by SIGSEGV", "rank_crashed", "Rank 3 was killed by SIGSEGV.", False),
        (137, "was killed by SIGKILL", "rank_crashed", "Rank 3 was killed by SIGKILL, possibly because memory", False),
    ],
)
def test_an_exit_code_of_the_contract_has_a_meaning(
    code: int, how: str, kind: str, summary: str, retryable: bool
) -> None:
    evidence = {"log": ["rank 3: no such data."]}
    found = explain_exit("Rank 3", code, how, "mlbench logs x", evidence)
    assert (found.code, found.retryable, found.evidence) == (kind, retryable, evidence)
    assert found.summary.startswith(summary)
    assert "mlbench logs x" in str(found.hint)


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (["x", "rank 0: first", "rank 0: then"], ": first (exit code 64)."),
        (["rank 0: first", "x"], " (exit code 64)."),
        (["rank 0:"], " (exit code 64)."),
        ([], " (exit code 64)."),
        (None, " (exit code 64)."),
    ],
)
def test_a_task_says_the_reason_last(log: object, words: str) -> None:
    assert (
        explain_exit("Rank 0", 64, "exited with 64", "", {"log": log}).summary
        == f"Rank 0 rejected its arguments{words}"
    )


@pytest.mark.parametrize(
    ("number", "words"),
    [(9, "was killed by SIGKILL"), (11, "was killed by SIGSEGV"), (200, "was killed by signal 200")],
)
def test_signals_have_names(number: int, words: str) -> None:
    assert describe_signal(number) == words


@pytest.mark.parametrize(
    ("peak", "limit", "words"),
    [
        (None, None, ""),
        (0, 0, ""),
        (2 << 30, None, ": its largest process used 2.0 GiB"),
        (None, 4 << 30, ": the limit is 4.0 GiB"),
        (2 << 30, 4 << 30, ": its largest process used 2.0 GiB, the limit is 4.0 GiB"),
    ],
)
def test_peak_and_limit_of_memory(peak: int | None, limit: int | None, words: str) -> None:
    assert describe_peak(peak, limit) == words


@pytest.mark.parametrize(
    ("text", "summary"),
    [
        ("RuntimeError: HIP out of memory.", "Rank 0 ran out of GPU memory."),
        ("torch.cuda.OutOfMemoryError: x", "Rank 0 ran out of GPU memory."),
        ("CUBLAS_STATUS_ALLOC_FAILED when calling", "Rank 0 ran out of GPU memory."),
        (
            "CUDA out of memory. GPU 0 has a total capacity of 79.11 GiB of which",
            "Rank 0 ran out of GPU memory: the GPU has 79.11 GiB.",
        ),
        (
            "CUDA out of memory. this process has 78.90 GiB memory in use.",
            "Rank 0 ran out of GPU memory: it used 78.90 GiB.",
        ),
        ("RuntimeError: DefaultCPUAllocator: out of memory", None),
        ("", None),
    ],
)
def test_a_gpu_without_memory_is_known_by_its_words(text: str, summary: str | None) -> None:
    found = explain_gpu_memory("Rank 0", text, {})
    assert (found.summary if found else None) == summary
    assert found is None or found.code == "gpu_out_of_memory"


def test_last_lines_are_those_that_people_wrote() -> None:
    event = format_event({"v": 1, "event": "metric", "rank": 0, "time": 1.0, "name": "loss", "value": 1})
    text = f"one\n\x1b[31mtwo\t2\n{event}\n   \n{'x' * 400}\n"
    assert last_lines(text, 10) == ["one", "[31mtwo 2", "x" * 300]
    assert last_lines(text, 1) == ["x" * 300]
    assert last_lines(text, 2) == ["[31mtwo 2", "x" * 300]
    assert last_lines("", 3) == []


def test_ten_lines_of_a_log_are_evidence(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"".join(b"%d\n" % number for number in range(30)))
    assert read_last_lines(tmp_path / "log") == [str(number) for number in range(20, 30)]
    assert read_last_lines(tmp_path / "nothing") == []


# --- local runs ------------------------------------------------------------------------------------------------------


def facts(**changes: Any) -> dict[str, Any]:
    plain = {"rank": 0, "exit_code": 3, "signal": None, "stopped": False, "out_of_memory": None, "start_error": None}
    return {**plain, **changes}


def found(state: dict[str, Any], *, gone: bool = False) -> tuple[Finding, ...]:
    plain = {"name": "x-1", "ended": None, "first_failed": None, "ranks": [facts()]}
    return diagnose({**plain, **state}, lambda rank: [f"line of {rank}"], timeout=90.5, gone=gone)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (facts(), "exited with 3"),
        (facts(signal=15, exit_code=143), "was killed by SIGTERM"),
        (facts(start_error="no such file", signal=15), "could not be started: no such file"),
    ],
)
def test_how_a_rank_ended_in_words(state: dict[str, Any], words: str) -> None:
    assert describe_exit(state) == words


@pytest.mark.parametrize(
    ("state", "code", "words"),
    [
        ({"ended": "deadline"}, "deadline", "stopped at its deadline of 90.5 s"),
        ({"stopping": "deadline"}, "deadline", "stopped at its deadline"),
        ({"ended": "client_lost"}, "client_lost", "The mlbench process that started the run died"),
        ({"ended": "never_started"}, "not_started", "nothing was started in the run's folder"),
        ({"ended": "never_started", "start_problem": "no disk"}, "not_started", "was not started: no disk."),
        ({"ended": "lost"}, "supervisor_lost", "The agent is gone"),
        ({"disk_full": True}, "disk_full", "The disk of the run's folder is full"),
        ({"network_problem": "9 Mbit/s"}, "network_not_as_asked", "is not available: 9 Mbit/s."),
    ],
)
def test_an_ending_has_a_finding(state: dict[str, Any], code: str, words: str) -> None:
    (finding,) = found(state)
    assert finding.code == code
    assert words in finding.summary


def test_an_agent_that_is_gone_counts_before_what_it_wrote() -> None:
    assert [finding.code for finding in found({"ended": "deadline"}, gone=True)] == ["supervisor_lost"]
    for ended in (None, "exited", "failed", "cancelled"):
        assert found({"ended": ended}) == ()


def test_the_rank_that_failed_first_comes_first() -> None:
    state = {"first_failed": 0, "disk_full": True, "ended": "deadline", "network_problem": "x"}
    assert [finding.code for finding in found(state)] == [
        *("rank_crashed", "network_not_as_asked", "disk_full", "deadline")
    ]


@pytest.mark.parametrize(
    ("rank", "code", "words"),
    [
        (facts(), "rank_crashed", "Rank 0 exited with 3."),
        (facts(start_error="no such file"), "command_not_found", "rank 0 could not be started: no such file."),
        (facts(exit_code=127), "command_not_found", "Rank 0 exited with 127: its shell did not find a command."),
        (facts(out_of_memory="cgroup"), "out_of_memory", "Rank 0 was killed by the system, out of memory."),
        (facts(out_of_memory="machine"), "out_of_memory", "the system, likely out of memory."),
    ],
)
def test_why_a_rank_failed(rank: dict[str, Any], code: str, words: str) -> None:
    (finding,) = found({"first_failed": 0, "ranks": [rank]})
    assert finding.code == code
    assert words in finding.summary
    assert finding.evidence == {"rank": 0, "exit_code": rank["exit_code"], "log": ["line of 0"]}
