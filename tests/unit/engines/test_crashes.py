"""What a failed process means, by its exit code and its last lines; and how local runs ended, from facts alone."""

from typing import Any

import pytest

from mlbench_cli.engines.crashes import (
    describe_peak,
    describe_signal,
    explain_exit,
)
from mlbench_cli.engines.diagnosis import describe_exit

# --- exit codes ------------------------------------------------------------------------------------------------------


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


# --- local runs ------------------------------------------------------------------------------------------------------


def facts(**changes: Any) -> dict[str, Any]:
    plain = {"rank": 0, "exit_code": 3, "signal": None, "stopped": False, "out_of_memory": None, "start_error": None}
    return {**plain, **changes}


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
