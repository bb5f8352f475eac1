"""The documents of `status -o json`, which the REST API returns, too: a run in detail, or a list of runs."""

from collections.abc import Callable, Sequence

from mlbench_cli.engines.base import CanExpire, Engine
from mlbench_cli.errors import DamagedArchive, MlbenchError
from mlbench_cli.model.run import JsonObject, Run, RunRow
from mlbench_cli.results.analysis.figures import listed_seconds
from mlbench_cli.runs.experiment_status import ExperimentStatus
from mlbench_cli.runs.finalize import read_finished
from mlbench_cli.runs.repeats import repeats_in
from mlbench_cli.runs.snapshot import (
    ENDED,
    RunStatus,
    damaged_status,
    finished_snapshot,
    live_snapshot,
    run_conditions,
)
from mlbench_cli.storage.store import Store
from mlbench_cli.util.times import timestamp

_FIGURES = ("goal", "seconds", "metrics", "conditions", "measured_network")


def runs_document(
    store: Store, states: Sequence[RunStatus], experiments: Sequence[ExperimentStatus] = ()
) -> JsonObject:
    """The runs with their figures, repeats put together, and the experiments that were asked for by name."""
    runs = [{**status.to_dict(), **figures} for status, figures in map(add_figures, states)]
    repeats = repeats_in(store, (status.row for status in states))
    document = {"runs": runs, "repeats": [found.to_dict() for found in repeats]}
    known = {"experiments": [item.to_dict() for item in experiments]} if experiments else {}
    return {**document, **known}


def run_details(row: RunRow, engine_of: Callable[[Run], Engine]) -> JsonObject:
    """A run with its workers, metrics and findings: from its archive, or as its engine sees it now."""
    document = finished_snapshot(row)
    if document is None:
        engine = engine_of(row.run)
        document = live_snapshot(row, engine)
        document["kept_until"] = _kept_until(row.run, engine) if document["state"] == ENDED else None
        document["ranks"] = [_with_timestamps(rank) for rank in document["ranks"]]
    return document


def add_figures(status: RunStatus) -> tuple[RunStatus, JsonObject]:
    """A row of a list with its figures: `goal` of result.json, `seconds` (see figures.py), the last `metrics`, and its
    conditions; None if the run has no results. The row of a damaged archive says so."""
    try:
        return status, _summary_figures(status.row.run)
    except DamagedArchive as damage:
        return damaged_status(status.row, damage), dict.fromkeys(_FIGURES)


def _summary_figures(run: Run) -> JsonObject:
    finished = read_finished(run)
    result = finished.result if finished else None
    if result is None:
        return dict.fromkeys(_FIGURES)
    figures = {"goal": result.get("goal"), "seconds": listed_seconds(result), "metrics": result.get("metrics")}
    return {**figures, **run_conditions(result)}


def _kept_until(run: Run, engine: Engine) -> str | None:
    """Until when the cluster keeps the results, RFC 3339; None if it does not, or does not say."""
    try:
        until = engine.kept_until(run) if isinstance(engine, CanExpire) else None
    except MlbenchError:
        return None
    return None if until is None else timestamp(until)


def _with_timestamps(rank: JsonObject) -> JsonObject:
    """A worker's times as RFC 3339, as in an archive."""
    moments = {key: rank[key] for key in ("started", "finished") if isinstance(rank.get(key), int | float)}
    return {**rank, **{key: timestamp(moment) for key, moment in moments.items()}}
