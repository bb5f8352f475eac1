"""From the records of a run's agents to findings. Pure, so every ending can be tested from facts alone."""

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from mlbench_cli.agent.messages import NOT_INSTALLED
from mlbench_cli.engines import crashes
from mlbench_cli.model.network import NOT_AS_ASKED, NOT_AS_ASKED_HINT
from mlbench_cli.model.run import Finding, Phase
from mlbench_cli.util.files import read_end
from mlbench_cli.util.text import list_some, rough_duration

EVIDENCE_LINES = 10
END_LINES = 30  # in which a traceback is no longer one that the program got over
MAX_SEARCHED = 8  # ranks
LAST_LINES = 300  # that are searched for a reason; at a deadline the stacks of all threads come last

Facts = Mapping[str, Any]


def diagnose(state: Facts, tail: Callable[[int], list[str]], *, timeout: float) -> tuple[Finding, ...]:
    """Why a run ended as it did, by the state of its agents. `tail(rank)` gives the last lines of a log.

    The rank that failed first comes first; ranks that were stopped because of it are not findings.
    """
    found = []
    first = state.get("first_failed")
    if first is not None:
        found.append(_failure_finding(state["name"], state["ranks"][first], tail(first)[-EVIDENCE_LINES:]))
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
    if stalled := state.get("stalled_seconds"):
        found.append(
            Finding(
                "agent_stalled",
                f"The agent did not run for {stalled:g} s: it was stopped, or the machine was overloaded, so times are "
                "too long.",
                hint="Run it again.",
                retryable=True,
            )
        )
    ending = state.get("ended") or state.get("stopping")
    if finding := _explain_ending(ending, state, timeout):
        found.append(_explain_idle(finding, state, tail) if "idle_since" in finding.evidence else finding)
    if ending == "exited" and not found:
        found += _find_hidden_failure(state, tail)
    return tuple(found)


def read_last_lines(path: Path) -> list[str]:
    """The last lines of a log; none if it cannot be read."""
    return crashes.last_lines(read_end(path).decode("utf-8", "replace"), LAST_LINES)


def describe_exit(facts: Facts) -> str:
    """How a rank ended, after "Rank N": "exited with 3", "was killed by SIGSEGV"."""
    if facts["start_error"]:
        return f"could not be started: {facts['start_error']}"
    if facts["signal"] is not None:
        return crashes.describe_signal(facts["signal"])
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
        peak = crashes.describe_peak(facts.get("peak_rss_bytes"), facts.get("memory_limit_bytes"))
        return Finding(
            "out_of_memory",
            f"Rank {rank} was killed by the system, {surely}out of memory{peak}.",
            hint="Use fewer workers or a smaller batch, or close other programs.",
            evidence=evidence,
        )
    who = f"Rank {rank}"
    if found := crashes.explain_log(who, "\n".join(lines), logs, evidence):
        return found
    if code == 127:
        return Finding(
            "command_not_found",
            f"Rank {rank} exited with 127: its shell did not find a command.",
            hint=logs,
            evidence=evidence,
        )
    return crashes.explain_exit(f"Rank {rank}", code, describe_exit(facts), logs, evidence)


def _find_hidden_failure(state: Facts, tail: Callable[[int], list[str]]) -> Iterator[Finding]:
    """The finding on a rank whose log ends with a traceback although it exited with 0, as a script without set -e."""
    for rank in [facts["rank"] for facts in state["ranks"][:MAX_SEARCHED] if not facts["restarts"]]:
        lines = tail(rank)[-END_LINES:]
        starts = [number for number, line in enumerate(lines) if "Traceback (most recent call last)" in line]
        if any(not number or "Exception ignored" not in lines[number - 1] for number in starts):
            yield Finding(
                "hidden_failure",
                f"Rank {rank} exited with 0 although its log ends with a traceback: a script without set -e may hide a "
                "failure.",
                hint=f"mlbench logs {state['name']} --rank {rank}",
                evidence={"rank": rank, "log": lines[-EVIDENCE_LINES:]},
            )
            return


def _explain_idle(finding: Finding, state: Facts, tail: Callable[[int], list[str]]) -> Finding:
    """The finding on ranks that wait, with those that no longer do, and the reason if a rank prints that it cannot
    connect."""
    if done := [str(facts["rank"]) for facts in state["ranks"] if facts["phase"] == Phase.SUCCEEDED]:
        who = f"Rank {done[0]} has" if len(done) == 1 else f"Ranks {list_some(done)} have"
        finding = replace(finding, summary=f"{finding.summary} {who} already ended, with exit code 0.")
    for facts in state["ranks"]:
        rank = facts["rank"]
        if cause := crashes.explain_unreachable(f"Rank {rank}", "\n".join(tail(rank)), finding.evidence):
            return replace(finding, summary=f"{finding.summary} {cause.summary}", hint=cause.hint)
    return finding


def _explain_ending(ending: str | None, state: Facts, timeout: float) -> Finding | None:
    idle = state.get("idle_since")
    if ending == "deadline" and idle:
        waited = rough_duration((state.get("finished") or time.time()) - idle)
        return Finding(
            "deadline",
            f"The run was stopped at its deadline of {timeout:g} s. No rank had used CPU for {waited}: the ranks hung, "
            "probably waiting for each other.",
            hint=f"mlbench logs {state['name']} --rank 0   ends with the stacks of the rank's threads",
            evidence={"idle_since": idle},
        )
    if ending == "deadline":
        summary = f"The run was stopped at its deadline of {timeout:g} s."
        return Finding("deadline", summary, hint="Set a longer --timeout (mlbench certify: --budget).")
    if ending is None and idle:
        return Finding(
            "idle",
            f"No rank has used CPU for {rough_duration(time.time() - idle)}: the ranks may wait for each other.",
            hint=f"mlbench status {state['name']} --stacks   shows where",
            evidence={"idle_since": idle},
        )
    if ending == "never_started":
        problem = state.get("start_problem") or "nothing was started in the run's folder"
        is_image = problem.startswith(NOT_INSTALLED)
        hint = "Start it again."
        if is_image:
            hint = (
                "Name an image that has them with --image, or an index that the workers reach: --env PIP_INDEX_URL=URL "
                "(without TLS also --env PIP_TRUSTED_HOST=HOST; through a proxy: --env HTTPS_PROXY=URL)."
            )
        return Finding("not_started", f"The run was not started: {problem}.", hint=hint, retryable=not is_image)
    return None
