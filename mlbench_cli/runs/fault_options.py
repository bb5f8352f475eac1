"""Resolve --faults, --on-failure, run.checkpoint_every and run.detect, and reject runs that cannot have them."""

import sys
from typing import Any

from mlbench_cli.errors import UsageError, did_you_mean
from mlbench_cli.model.faults import (
    FaultKind,
    FaultScript,
    Policy,
    best_interval,
    expected_attempts,
    parse_every,
    parse_faults,
    read_faults,
)
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.runs.request import Request
from mlbench_cli.util.durations import parse_duration
from mlbench_cli.util.text import shorten

OPTIONS = ("faults", "on_failure", "checkpoint_every", "detect")  # of a request
MIN_DETECT_SECONDS = 1.0
# Typical seconds of a small training: how long a checkpoint blocks the ranks, and how long it takes until a new attempt
# trains. They only choose the checkpoint interval; the result has the measured values, and `mlbench predict --faults`
# takes others.
CHECKPOINT_SECONDS, RESTART_SECONDS = 0.05, 4.0
DEFAULT_SECONDS = 60.0  # between checkpoints, if faults do not repeat
MAX_ATTEMPTS = 10.0  # expected until one reaches its first checkpoint; above this a script is rejected


def resolve_faults(request: Request) -> dict[str, Any]:
    """The fields of RunSpec for fault injection and restarts."""
    fields: dict[str, Any] = {}
    script = None if request.faults is None else read_faults(request.faults)
    if script is not None:
        fields["faults"] = str(script)
    if request.on_failure in ("replace", "shrink"):
        raise UsageError(f"--on-failure {request.on_failure} was removed.", hint="--on-failure restart")
    policy = Policy(_choose("--on-failure", request.on_failure or Policy.FAIL, [*Policy]))
    if request.checkpoint_every is not None:
        if policy is Policy.FAIL:
            raise UsageError("run.checkpoint_every needs --on-failure restart.", hint="Add --on-failure restart.")
        parse_every(request.checkpoint_every)
    if policy is not Policy.FAIL:
        fields["on_failure"] = str(policy)
        fields["checkpoint_every"] = request.checkpoint_every or _choose_interval(script)
    if request.detect is not None:
        seconds = parse_duration(request.detect, "run.detect")
        if seconds < MIN_DETECT_SECONDS:
            raise UsageError(f"run.detect={shorten(request.detect)}: the minimum is {MIN_DETECT_SECONDS:g} s.")
        fields["detect_seconds"] = seconds
    return fields


def _choose(option: str, word: str, words: list[str]) -> str:
    if word not in words:
        near = did_you_mean(word, words)
        raise UsageError(f'There is no {option} "{shorten(word)}", only {", ".join(words)}.{near}')
    return word


def _choose_interval(script: FaultScript | None) -> str:
    """Daly's interval for faults that repeat."""
    mtbf = None if script is None else script.mtbf
    if mtbf is None:
        return f"{DEFAULT_SECONDS:g}s"
    return f"{max(1.0, round(best_interval(CHECKPOINT_SECONDS, mtbf), 1)):g}s"


def check_faults(spec: RunSpec) -> None:
    """Refuse faults and policies that this run cannot have. Raises UsageError."""
    asked = "--faults" if spec.faults else "--on-failure" if spec.on_failure else "run.detect"
    if spec.engine == "kubernetes":
        raise UsageError(
            f"{asked} does not work on Kubernetes.", hint="Leave it out, or run on this machine, on hosts or on Slurm."
        )
    if spec.engine == "local" and sys.platform != "linux":
        raise UsageError(f"{asked} needs Linux.", hint="Leave it out.")
    if not spec.run_on_all:
        raise UsageError(
            f"{asked}: mlbench starts only rank 0 of this run; a launcher starts the others.",
            hint="--backend gloo, or --set run.run_on_all=yes",
        )
    script = None if spec.faults is None else parse_faults(spec.faults)
    if script is not None:
        _check_script(spec, script)
    if spec.on_failure is not None:
        _check_policy(spec, script)


def _check_script(spec: RunSpec, script: FaultScript) -> None:
    script.check(spec.world_size, spec.workers)
    if FaultKind.LINK in script.kinds and not spec.has_shaped_network:
        raise UsageError(
            "--faults: link faults need a shaped network.",
            hint="Add --network 1gbit and at least two workers, or remove the link faults.",
        )
    endless = [item for item in script.items if item.kind is FaultKind.STOP and item.seconds is None]
    if endless and spec.detect_seconds is None:
        raise UsageError(
            f'--faults "{endless[0]}": the rank would stay stopped until collectives of the other ranks time out.',
            hint="Add --set run.detect=10s, or a duration: for 20s stop ...",
        )


def _check_policy(spec: RunSpec, script: FaultScript | None) -> None:
    if spec.servers:
        raise UsageError(
            f"--on-failure {spec.on_failure}: the method {spec.method.get('name')} has parameter servers, whose state "
            "is in no checkpoint of the ranks.",
            hint="--on-failure fail, or a method without servers (mlbench methods)",
        )
    if spec.parameters.get("blocks"):
        raise UsageError(
            f"--on-failure {spec.on_failure}: throughput runs write no checkpoints.",
            hint="Remove --set blocks, or choose a preset that trains to a goal.",
        )
    if spec.parameters.get("resume"):
        raise UsageError(
            f"--on-failure {spec.on_failure} and --set resume exclude each other: a restart goes back to the run's own "
            "checkpoints.",
            hint="Remove --set resume=...",
        )
    mtbf = None if script is None else script.mtbf
    seconds, _ = parse_every(spec.checkpoint_every or "60s")
    if mtbf is None or seconds is None or script is None or script.is_forced:
        return
    attempts = expected_attempts(mtbf, RESTART_SECONDS + seconds + CHECKPOINT_SECONDS)
    if attempts > MAX_ATTEMPTS:
        raise UsageError(
            f"The run would hardly ever reach a checkpoint: with a fault every {mtbf:.4g} s on average, and "
            f"{RESTART_SECONDS + seconds:.4g} s from a start to the first checkpoint, it takes {attempts:.3g} attempts"
            " to get there.",
            hint="More frequent checkpoints (--set run.checkpoint_every=30s), rarer faults, or the word anyway in the "
            "script",
        )
