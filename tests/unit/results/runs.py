"""Runs with hand-written logs, sealed by `seal` itself."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from mlbench_cli.model.run import Ending, Observation, Outcome, Run, RunState, WorkerState
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.results.archive.record import write_run_document
from mlbench_cli.results.archive.seal import seal
from mlbench_cli.storage.store import Store
from mlbench_cli.util.times import timestamp
from task_images.contract import format_event

START = 1_760_000_000.0  # 2025-10-09T08:53:20Z
SHARES = {
    "data_wait": 0.04,
    "preprocessing": 0.02,
    "forward": 0.16,
    "loss": 0.02,
    "backward": 0.32,
    "communication": 0.24,
    "optimizer": 0.05,
    "metrics": 0.03,
    "validation": 0.10,
    "other": 0.02,
}


def event(kind: str, rank: int = 0, at: float = 0.0, **fields: Any) -> str:
    return format_event({"v": 1, "event": kind, "rank": rank, "time": START + at, **fields})


def timings(seconds: float, shares: Mapping[str, float] = SHARES) -> dict[str, dict[str, float]]:
    return {
        name: {"min": 0.9 * own, "mean": own, "max": 1.1 * own, "rank0": own}
        for name, own in ((name, share * seconds) for name, share in shares.items())
    }


def result_event(seconds: float = 100.0, outcome: str = "goal_reached", **changes: Any) -> str:
    goal = {"metric": "Prec@1", "comparison": ">=", "threshold": 80.0, "kind": "full", "value": 80.5}
    if outcome == "goal_missed":
        goal["value"] = 61.25
    fields: dict[str, Any] = {
        "outcome": outcome,
        "goal": None if outcome == "completed" else goal,
        "wall_seconds": seconds,
        "training_seconds": seconds * 0.86,
        "timings": timings(seconds),
        "updates": 400,
        "samples": 51200,
        "epochs": 3,
        "synthetic": False,
        "data": "digits",
        "details": {"best": 80.5},
    }
    return event("result", at=seconds + 1, **{**fields, **changes})


def training_log(
    rank: int = 0,
    seconds: float = 100.0,
    outcome: str = "goal_reached",
    environment: Mapping[str, Any] | None = None,
    **changes: Any,
) -> list[str]:
    """The log of a rank that trains for three epochs; `environment` replaces fields of what it reports of itself."""
    variables = {"OMP_NUM_THREADS": "1", "REGISTRY_TOKEN": "hush"}
    own = dict(environment or {})
    lines = [
        "loading the data",
        event(
            "environment", rank, **{"framework": "torch", "version": "2.15.0", "threads": 1, "env": variables, **own}
        ),
        event("phase", rank, 0.5, phase="training", epoch=0, epochs=3),
    ]
    last = 80.5 if outcome == "goal_reached" else 61.25
    last = (changes.get("goal") or {}).get("last", last)
    for epoch, accuracy in enumerate((40.0, 60.0, last)):
        at = seconds * (epoch + 1) / 3
        loss = 2.0 / (epoch + 1)
        lines += [
            f"epoch {epoch} of 3",
            event("metric", rank, at, name="train_loss", value=loss, epoch=epoch, step=10 * epoch, seconds=at),
            event("metric", rank, at, name="val_loss", value=0.75 * loss, epoch=epoch, seconds=at),
        ]
        if rank == 0:
            lines.append(event("metric", at=at, name="val_Prec@1", value=accuracy, epoch=epoch, seconds=at, unit="%"))
    if rank == 0:
        lines.append(result_event(seconds, outcome, **changes))
    return lines


def spec(name: str = "demo-2", workers: int = 2, **changes: Any) -> RunSpec:
    fields: dict[str, Any] = {
        "name": name,
        "cluster": "local",
        "engine": "local",
        "task": "unknown-task",
        "preset": "spec",
        "argv": ("python", "-m", "task"),
        "backend": "gloo",
        "workers": workers,
        "parameters": {"batch_size": 128, "goal_full": 80.0, "goal_light": 70.0},
    }
    return RunSpec(**{**fields, **changes})


def observation_of(
    workers: int = 2, seconds: float = 103.0, exit_codes: Iterable[int | None] = (), **changes: Any
) -> Observation:
    codes = list(exit_codes) or [0] * workers
    states = tuple(
        WorkerState(rank, "succeeded" if code == 0 else "failed", None, "this-host", code, START, START + seconds)
        for rank, code in enumerate(codes)
    )
    return Observation(**{"time": START + seconds, "workers": states, "ended": Ending.EXITED, **changes})


def new_run(folder: Path, run_spec: RunSpec | None = None, logs: Mapping[int, Iterable[str]] | None = None) -> Run:
    """A run whose ranks have ended, not yet sealed."""
    run_spec = run_spec or spec()
    identity = hashlib.sha256(str(folder).encode()).hexdigest()[:12]
    run = Run(identity, run_spec, folder, timestamp(START - 1))
    (folder / "logs").mkdir(parents=True)
    if logs is None:
        logs = {rank: training_log(rank) for rank in range(run_spec.workers)}
    for rank, lines in logs.items():
        (folder / "logs" / f"rank-{rank}.log").write_text("".join(f"{line}\n" for line in lines))
    return run


def sealed_run(folder: Path, outcome: str = "goal_reached", **changes: Any) -> Path:
    """The folder of a sealed run.

    `changes`: seconds, fields of the result event, and of the spec; `environment` (fields that ranks report of
    themselves), `provenance`, `image_digest`, `samples` (rows of resources.jsonl), and `lines` (of rank 0's log).
    """
    seconds = changes.pop("seconds", 100.0)
    names = (
        "synthetic",
        "data",
        "timings",
        "goal",
        "budget_seconds",
        "environment",
        "epochs",
        "details",
        "training_seconds",
    )
    result = {key: changes.pop(key) for key in names if key in changes}
    more = {key: changes.pop(key, None) for key in ("provenance", "image_digest", "samples", "lines")}
    run_spec = spec(**{"name": f"run-{changes.get('workers', 2)}", **changes})
    ranks = range(run_spec.workers)
    failed = outcome == "failed"
    logs = {rank: training_log(rank, seconds, outcome, **result) for rank in ranks}
    logs[0][-1:-1] = more["lines"] or []
    if failed:
        logs[0] = [*logs[0][:-1], "Traceback (most recent call last):"]
    run = new_run(folder, run_spec, logs)
    seen = observation_of(run_spec.workers, seconds + 3, [int(failed and rank == 0) for rank in ranks])
    if more["image_digest"]:
        seen = replace(seen, workers=tuple(replace(x, image_digest=more["image_digest"]) for x in seen.workers))
    if more["samples"]:
        (folder / "resources.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in more["samples"]))
    write_run_document(run, more["provenance"])
    seal(run, seen)
    return folder


def sealed_repeats(
    folder: Path, seconds: Sequence[float], outcome: str = "goal_reached", workers: int = 1, **changes: Any
) -> list[str]:
    """The folders of sealed runs that are repeats of each other; `changes` as of `sealed_run`."""
    fields = {"workers": workers, **changes}
    return [
        str(sealed_run(folder / f"{number}", outcome, name=f"x-{workers}-r{number}", seconds=each, **fields))
        for number, each in enumerate(seconds)
    ]


def record_sealed(
    store: Store,
    name: str,
    workers: int,
    seconds: float,
    outcome: str = "goal_reached",
    *,
    samples: str = "",
    lines: Sequence[str] = (),
    provenance: Mapping[str, Any] | None = None,
    repeats: int | None = None,
    created: str | None = None,
    **changes: Any,
) -> Run:
    """A sealed run in the store. `samples`: its resources.jsonl; `lines`: of rank 0's log; `created`: default: just
    before its start; `changes`: fields of its spec."""
    created = created or timestamp(START - 1)
    run = store.record_run(spec(name=name, workers=workers, **changes), created=created)
    logs = {rank: training_log(rank, seconds, outcome) for rank in range(workers)}
    logs[0][-1:-1] = lines
    failed = outcome == "failed"
    if failed:
        logs[0] = [*logs[0][:-1], "Traceback (most recent call last):"]
    new_run(run.folder, run.spec, logs)
    if samples:
        (run.folder / "resources.jsonl").write_text(samples)
    write_run_document(run, provenance, repeats)
    seal(run, observation_of(workers, seconds + 3, [int(failed and rank == 0) for rank in range(workers)]))
    store.advance(run, RunState.FINISHED, Outcome(outcome))
    return run
