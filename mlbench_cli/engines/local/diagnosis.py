"""From an agent's records to findings. Pure, so every ending can be tested from facts alone."""

import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mlbench_cli.engines.memory import GPU_MEMORY, describe_gpu_peak, describe_peak
from mlbench_cli.model.network import NOT_AS_ASKED, NOT_AS_ASKED_HINT
from mlbench_cli.model.run import Finding
from mlbench_cli.util.files import read_end
from task_images import contract

EVIDENCE_LINES = 10
EVIDENCE_WIDTH = 300

Facts = Mapping[str, Any]


def diagnose(
    state: Facts, tail: Callable[[int], list[str]], *, timeout: float, gone: bool = False
) -> tuple[Finding, ...]:
    """Why a local run ended as it did. `tail(rank)` gives the last lines of a log; `gone`: the agent is gone.

    The rank that failed first comes first; ranks that were stopped because of it are not findings.
    """
    found = []
    first = state.get("first_failed")
    if first is not None:
        found.append(_failure_finding(state["name"], state["ranks"][first], tail(first)))
    if problem := state.get("network_problem"):
        found.append(
            Finding(
                NOT_AS_ASKED,
                f"The requested network is not available: {problem}.",
                hint=NOT_AS_ASKED_HINT,
                retryable=True,
            )
        )
    if state.get("disk_full"):
        found.append(
            Finding(
                "disk_full",
                "The disk of the run's folder is full: the last files are incomplete.",
                hint="Free up disk space, or set MLBENCH_HOME to a folder on another disk.",
                retryable=True,
            )
        )
    ending = _ENDINGS.get(state.get("ended") or state.get("stopping") or "")
    if gone:
        ending = _ENDINGS["lost"]
    if ending:
        found.append(ending(state, timeout))
    return tuple(found)


def read_last_lines(path: Path) -> list[str]:
    """`last_lines` of a file; none if it cannot be read."""
    return last_lines(read_end(path))


def last_lines(data: bytes) -> list[str]:
    """The last lines of a log as evidence: no events, no control characters, of bounded width."""
    lines = []
    for line in reversed(data.split(b"\n")):
        if contract.parse_event(line) is not None:
            continue
        text = "".join(char if char.isprintable() else " " for char in line.decode("utf-8", "replace")).strip()
        if text:
            lines.append(text[:EVIDENCE_WIDTH])
        if len(lines) == EVIDENCE_LINES:
            break
    return lines[::-1]


def signal_name(number: int) -> str:
    """The name of a signal, for example SIGKILL for 9; "signal N" for a number without one."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_exit(facts: Facts) -> str:
    """How a rank ended, after "Rank N": "exited with 3", "was killed by SIGSEGV"."""
    if facts["start_error"]:
        return f"could not be started: {facts['start_error']}"
    if facts["signal"] is not None:
        return f"was killed by {signal_name(facts['signal'])}"
    return f"exited with {facts['exit_code']}"


def _failure_finding(name: str, facts: Facts, lines: list[str]) -> Finding:
    """The finding on the rank that failed first."""
    rank, code = facts["rank"], facts["exit_code"]
    evidence = {"rank": rank, "exit_code": code, "log": lines}
    logs = f"mlbench logs {name} --rank {rank}"
    if facts["start_error"]:
        return Finding(
            "command_not_found",
            f"The command of rank {rank} {describe_exit(facts)}.",
            hint="The command runs without a shell: check its first word, and PATH.",
            evidence=evidence,
        )
    if facts["out_of_memory"]:
        surely = "" if facts["out_of_memory"] == "cgroup" else "likely "
        peak = describe_peak(facts.get("peak_rss_bytes"), facts.get("memory_limit_bytes"))
        return Finding(
            "out_of_memory",
            f"Rank {rank} was killed by the system, {surely}out of memory{peak}.",
            hint="Use fewer workers or a smaller batch, or close other programs.",
            evidence=evidence,
        )
    if GPU_MEMORY.search(text := "\n".join(lines)):
        return Finding(
            "gpu_out_of_memory",
            f"Rank {rank} ran out of GPU memory{describe_gpu_peak(text)}.",
            hint="Use a smaller batch.",
            evidence=evidence,
        )
    if code == 127:
        return Finding(
            "command_not_found",
            f"Rank {rank} exited with 127: its shell did not find a command.",
            hint=logs,
            evidence=evidence,
        )
    if code == contract.EXIT_USAGE:
        return Finding("usage", f"Rank {rank} rejected its arguments (exit code {code}).", hint=logs, evidence=evidence)
    if code == contract.EXIT_WRONG:
        return Finding(
            "wrong_result",
            f"A check on rank {rank} found that communication between ranks gives wrong results (exit code {code}).",
            hint=f"Do not trust any result of this run. Details: {logs}",
            evidence=evidence,
        )
    if code == contract.EXIT_ENVIRONMENT:
        return Finding(
            "bad_environment",
            f"Rank {rank} cannot run in this environment (exit code {code}).",
            hint=logs,
            evidence=evidence,
        )
    if code == contract.EXIT_RETRYABLE:
        return Finding(
            "retryable",
            f"Rank {rank} failed for a reason that may be temporary (exit code {code}).",
            hint=f"Run it again. {logs}",
            retryable=True,
            evidence=evidence,
        )
    by_whom = ", possibly because memory ran out" if facts["signal"] == signal.SIGKILL else ""
    return Finding("rank_crashed", f"Rank {rank} {describe_exit(facts)}{by_whom}.", hint=logs, evidence=evidence)


def _deadline(state: Facts, timeout: float) -> Finding:
    return Finding("deadline", f"The run was stopped at its deadline of {timeout:g} s.", hint="Set a longer --timeout.")


def _client_lost(state: Facts, timeout: float) -> Finding:
    return Finding(
        "client_lost",
        "The mlbench process that started the run died, so the run ended.",
        hint="To let runs outlive the client, use --detach.",
        retryable=True,
    )


def _never_started(state: Facts, timeout: float) -> Finding:
    problem = state.get("start_problem") or "nothing was started in the run's folder"
    return Finding("not_started", f"The run was not started: {problem}.", hint="Start it again.", retryable=True)


def _lost(state: Facts, timeout: float) -> Finding:
    return Finding(
        "supervisor_lost",
        "The agent is gone (it was killed, or the machine was restarted), so its ranks ended.",
        hint="Run it again.",
        retryable=True,
    )


_ENDINGS: dict[str, Callable[[Facts, float], Finding]] = {
    "deadline": _deadline,
    "client_lost": _client_lost,
    "never_started": _never_started,
    "lost": _lost,
}
