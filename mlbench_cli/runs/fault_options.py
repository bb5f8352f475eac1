"""What --faults, --on-failure, --checkpoint-every and --detect mean together, and which runs can keep it."""

import math
import sys
from typing import Any

from mlbench_cli.agent.storage import try_to_slow
from mlbench_cli.config.settings import data_dir
from mlbench_cli.errors import UsageError, did_you_mean
from mlbench_cli.model.faults import (
    CheckpointCopy,
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

MIN_DETECT_SECONDS = 1.0
# Of a small training: what a checkpoint blocks, and what passes until a new attempt trains. They choose an interval,
# and measured ones are in the result; `mlbench predict --faults` takes others.
CHECKPOINT_SECONDS, RESTART_SECONDS = 0.05, 4.0
DEFAULT_SECONDS = 60.0  # between checkpoints, if faults do not repeat
MAX_ATTEMPTS = 10.0  # on average until one lives to its first checkpoint: more is refused


def resolve_faults(request: Request) -> dict[str, Any]:
    """The fields of RunSpec that say which faults a run meets and what follows; empty if nothing was asked."""
    fields: dict[str, Any] = {}
    script = None if request.faults is None else read_faults(request.faults)
    if script is not None:
        fields["faults"] = str(script)
    policy = Policy(_choose("--on-failure", request.on_failure or Policy.FAIL, [*Policy]))
    copy = _choose("--checkpoint-copy", request.checkpoint_copy or CheckpointCopy.DISK, [*CheckpointCopy])
    if copy != CheckpointCopy.DISK:
        fields["checkpoint_copy"] = copy
    if request.checkpoint_every is not None:
        if policy is Policy.FAIL:
            raise UsageError(
                "--checkpoint-every needs --on-failure restart, replace or shrink.", hint="Add --on-failure restart."
            )
        parse_every(request.checkpoint_every)
    if policy is not Policy.FAIL:
        fields["on_failure"] = str(policy)
        fields["checkpoint_every"] = request.checkpoint_every or _choose_interval(script)
    if request.detect is not None:
        seconds = parse_duration(request.detect, "--detect")
        if seconds < MIN_DETECT_SECONDS:
            raise UsageError(f"--detect {shorten(request.detect)}: the minimum is {MIN_DETECT_SECONDS:g} s.")
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
    if spec.checkpoint_copy is not None:
        _check_copy(spec)
    if not spec.has_faults:
        return
    asked = "--faults" if spec.faults else "--on-failure" if spec.on_failure else "--detect"
    if spec.engine == "local" and sys.platform != "linux":
        raise UsageError(f"{asked} needs Linux.", hint="Leave it out.")
    if not spec.run_on_all:
        raise UsageError(
            f"{asked}: mlbench starts only rank 0 of this run; a launcher starts the others.",
            hint="--backend gloo, or --run-on-all",
        )
    script = None if spec.faults is None else parse_faults(spec.faults)
    if script is not None:
        _check_script(spec, script)
    if spec.on_failure is not None:
        _check_policy(spec, script)


def _check_script(spec: RunSpec, script: FaultScript) -> None:
    script.check(spec.world_size, spec.workers)
    if FaultKind.LINK in script.kinds and spec.engine == "kubernetes":
        raise UsageError(
            "--faults: links cannot be changed on Kubernetes, because pods have no right to.",
            hint="Remove the link faults, or run on this machine with --network 1gbit.",
        )
    if FaultKind.LINK in script.kinds and not spec.has_shaped_network:
        raise UsageError(
            "--faults: link faults need a shaped network.",
            hint="Add --network 1gbit and at least two workers, or remove the link faults.",
        )
    if FaultKind.STORAGE in script.kinds:
        _check_storage(spec)
    endless = [item for item in script.items if item.kind is FaultKind.STOP and item.seconds is None]
    if endless and spec.detect_seconds is None:
        raise UsageError(
            f'--faults "{endless[0]}": the rank would stay stopped until collectives of the other ranks time out.',
            hint="Add --detect 10s, or a duration: for 20s stop ...",
        )


def _check_storage(spec: RunSpec) -> None:
    """Whether storage can be slowed; other machines are asked when the fault is due."""
    if spec.engine == "kubernetes":
        raise UsageError(
            "--faults: storage cannot be slowed on Kubernetes, because pods have no right to.",
            hint="Remove the storage faults, or run on this machine as root.",
        )
    if spec.engine == "local":
        try:
            try_to_slow(str(data_dir()))
        except OSError as error:
            raise UsageError(
                f"--faults: storage cannot be slowed here: {error}.", hint="Remove the storage faults."
            ) from None


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
    if script is not None and spec.engine != "local":
        _check_lost_nodes(spec, script)
    if spec.on_failure == Policy.SHRINK:
        _check_shrinking(spec)
    if spec.on_failure == Policy.REPLACE and not (spec.runs_task_program and spec.backend == "gloo"):
        what = f"--backend {spec.backend}" if spec.runs_task_program else "your own command"
        raise UsageError(
            f"--on-failure replace: with {what}, a rank that loses another one ends, so it cannot wait for it.",
            hint="--on-failure restart, which starts all ranks again",
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
            hint="More frequent checkpoints (--checkpoint-every), rarer faults, or the word anyway in the script",
        )


def _check_lost_nodes(spec: RunSpec, script: FaultScript) -> None:
    """Ranks of a node that is gone cannot start again: there is no spare one. Only shrinking goes on without them."""
    items = [item for item in script.items if item.kind is FaultKind.NODE]
    if not items:
        return
    if spec.engine == "kubernetes":
        raise UsageError(
            f"--on-failure {spec.on_failure}: on Kubernetes, a node that is gone ends the run, because its Job fails.",
            hint="Leave out --on-failure, or kill its ranks only: at 60s kill rank 1",
        )
    if spec.on_failure != Policy.SHRINK:
        raise UsageError(
            f"--on-failure {spec.on_failure}: there is no spare machine for the ranks of a node that is gone.",
            hint="--on-failure shrink, or kill its ranks only: at 60s kill rank 1",
        )
    for item in items:
        if item.target is None or item.every is not None:
            raise UsageError(
                f'--faults "{item}" with --on-failure shrink: a node is gone only once, and node 0 has to stay.',
                hint="Name the node and the time: at 60s node 1 gone",
            )


def _check_copy(spec: RunSpec) -> None:
    """A copy is of use only if the run can go on without the machine that it came from."""
    if spec.on_failure != Policy.SHRINK:
        raise UsageError(
            f"--checkpoint-copy {spec.checkpoint_copy} needs --on-failure shrink: otherwise the loss of a machine ends "
            "the run.",
            hint="Add --on-failure shrink, or leave out --checkpoint-copy.",
        )
    if spec.engine not in ("hosts", "slurm"):
        place = "this machine has no peer" if spec.engine == "local" else "a pod that is lost ends the run"
        raise UsageError(
            f"--checkpoint-copy {spec.checkpoint_copy} works on hosts and Slurm: {place}.",
            hint="Leave out --checkpoint-copy.",
        )


def _check_shrinking(spec: RunSpec) -> None:
    """Shrinking keeps the global batch: what ranks have each must be whole for every number of workers."""
    if spec.processes_per_worker != 1:
        raise UsageError("--on-failure shrink needs one process per worker.", hint="Leave out --processes-per-worker.")
    batch = spec.parameters.get("batch_size")
    if not spec.runs_task_program or not isinstance(batch, int):
        raise UsageError(
            "--on-failure shrink keeps the global batch by the parameter batch_size, which this run does not have.",
            hint="--on-failure restart, or a task with batch_size (mlbench tasks)",
        )
    total = batch * spec.workers
    if spec.workers < 2 or total % (spec.workers - 1):
        raise UsageError(
            f"--on-failure shrink: a global batch of {total} samples cannot be divided evenly among "
            f"{spec.workers - 1} ranks.",
            hint=f"--set batch_size={math.lcm(*range(1, spec.workers + 1))}, or --on-failure restart",
        )
