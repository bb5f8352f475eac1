"""What a run that has ended has left for its client: one document in its folder, read without engine or archive.

`supervise` writes it when it has decided; `status` reads it, and needs nothing heavier for a run that is over.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlbench_cli.model import Run, RunRow


def outcome_file(run: Run) -> Path:
    return run.folder / ".state" / "outcome.json"


def read_settled(run: Run) -> dict[str, Any] | None:
    """word, summary, observation, progress, metrics; None for a run that is not settled."""
    try:
        document = json.loads(outcome_file(run).read_bytes())
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def snapshot_of_settled(row: RunRow) -> dict[str, Any] | None:
    """What there is to say of a run for `status`, JSON values only; None for one that is not settled."""
    document = read_settled(row.run)
    if document is None:
        return None
    ended = {"state": "finished", "outcome": document["word"], "summary": document["summary"]}
    return {**described(row), **ended, **seen_as(document["observation"], document["progress"], document["metrics"])}


def described(row: RunRow) -> dict[str, Any]:
    """What a run is, whatever becomes of it."""
    run, spec = row.run, row.run.spec
    return {
        "name": run.name,
        "id": run.id,
        "cluster": spec.cluster,
        "engine": spec.engine,
        "task": spec.task,
        "preset": spec.preset,
        "backend": spec.backend,
        "device": spec.device,
        "functional_only": spec.functional_only,
        "workers": spec.workers,
        "world_size": spec.world_size,
        "created": run.created,
        "folder": str(run.folder),
        "state": row.state,
        "outcome": row.outcome,
    }


def seen_as(
    observation: Mapping[str, Any], progress: Mapping[str, Any], metrics: Mapping[str, float]
) -> dict[str, Any]:
    """What was seen of a run, of its observation as a dictionary."""
    return {
        "ended": observation["ended"],
        "first_failed": observation["first_failed"],
        "ranks": list(observation["workers"]),
        "progress": progress,
        "metrics": metrics,
        "goal": _goal(progress),
        "findings": list(observation["findings"]),
    }


def _goal(progress: Mapping[str, Any]) -> dict[str, Any] | None:
    """The goal with how far the best value is from it, in the metric's unit; 0 when it was reached."""
    if progress["metric"] is None or progress["threshold"] is None:
        return None
    facts = {key: progress[key] for key in ("metric", "comparison", "threshold", "value", "best")}
    if facts["best"] is None:
        return {**facts, "distance": None}
    gap = facts["threshold"] - facts["best"]
    return {**facts, "distance": max(0.0, gap if facts["comparison"] == ">=" else -gap)}
