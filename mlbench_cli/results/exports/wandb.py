"""Weights & Biases: one run per archive, offline for `wandb sync` unless WANDB_MODE says otherwise."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

from mlbench_cli.config.extras import load_library
from mlbench_cli.errors import UnreachableError
from mlbench_cli.results.analysis.tables import MetricTable, ResourceTable
from mlbench_cli.results.exports.facts import RunFacts, list_values, name_with_rank


def export_run(target: str, facts: RunFacts, metrics: MetricTable, samples: ResourceTable) -> None:
    """Write a run into the folder `target`. W&B's own recording of machine, packages and repository is switched off."""
    wandb = load_library("wandb", "wandb")
    folder = Path(target)
    folder.mkdir(parents=True, exist_ok=True)
    quiet = {"disable_git": True, "x_disable_stats": True, "x_disable_meta": True, "x_save_requirements": False}
    try:
        run: Any = wandb.init(
            project="mlbench",
            name=facts.name,
            id=facts.id,
            group=facts.task,
            config=dict(facts.config),
            dir=str(folder),
            mode=os.environ.get("WANDB_MODE", "offline"),
            settings=wandb.Settings(**quiet, console="off", silent=True),
            reinit="create_new",
        )
    except (wandb.errors.Error, OSError) as error:
        raise UnreachableError(f"Weights & Biases: {error}", hint="wandb login, or unset WANDB_MODE") from None
    run.define_metric("*", step_metric="seconds since 1970")
    for row in _rows(metrics, samples):
        run.log(row)
    run.summary.update({**facts.summary, "outcome": facts.outcome})
    run.finish()


def _rows(metrics: MetricTable, samples: ResourceTable) -> list[dict[str, float]]:
    """A row per time of a rank, in the order of time, because W&B rejects rows older than the previous one.

    Several values of a metric in the same millisecond become separate rows.
    """
    rows: dict[tuple[float, int, int], dict[str, float]] = {}
    counts: Counter[tuple[float, int, str]] = Counter()
    for point in metrics:
        at = (point.time, point.rank, point.name)
        row = rows.setdefault((point.time, point.rank, counts[at]), {"seconds since 1970": point.time})
        counts[at] += 1
        row[name_with_rank(point.name, point.rank)] = point.value
        row |= {name: value for name in ("epoch", "step") if (value := getattr(point, name)) is not None}
    for sample in samples:
        row = rows.setdefault((sample.time, sample.rank, 0), {"seconds since 1970": sample.time})
        row |= {name_with_rank(name, sample.rank): value for name, value in list_values(sample)}
    return [rows[key] for key in sorted(rows)]
