"""`mlbench campaign`: a file of many settings -> experiments -> runs in interleaved order -> table and figures."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from mlbench_cli import console
from mlbench_cli.commands._common import Format, Output, Yes, engine_of, renderer_of
from mlbench_cli.commands._members import follow_all
from mlbench_cli.commands._report import Ended
from mlbench_cli.errors import UsageError
from mlbench_cli.files import write_atomically
from mlbench_cli.model import Experiment, JsonObject, Run
from mlbench_cli.results.analysis.campaign import Row, Sample, make_rows, read_sample, to_csv, to_document, to_markdown
from mlbench_cli.results.analysis.rates import select_series
from mlbench_cli.runs import queue
from mlbench_cli.runs.campaign import (
    Budget,
    Campaign,
    Forecast,
    History,
    Lot,
    find_file,
    forecast,
    interleave,
    list_shipped,
    make_lots,
    read_campaign,
    settings_of,
)
from mlbench_cli.runs.defaults import default_cluster, with_defaults
from mlbench_cli.runs.experiment import Candidate, Plan, absolute_paths
from mlbench_cli.runs.finished import read_finished
from mlbench_cli.runs.matrix import MAX_CONFIRMED, MAX_MEMBERS
from mlbench_cli.runs.recording import record
from mlbench_cli.runs.request import request_document
from mlbench_cli.runs.start import document_writer, plan_experiment
from mlbench_cli.store import Store
from mlbench_cli.times import now

BUDGET_SPENT = 124


def campaign(
    context: typer.Context,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help=f"campaign file, or one that is shipped: {', '.join(list_shipped())}")
    ],
    to: Annotated[
        Path | None, typer.Option("--to", metavar="FOLDER", help="folder for table and figures; default: ./NAME")
    ] = None,
    clusters: Annotated[
        list[str] | None, typer.Option("--cluster", metavar="NAME", help="run here instead; repeatable")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print the runs, with time and price as far as they are known, and stop")
    ] = False,
    only_report: Annotated[
        bool, typer.Option("--only-report", help="start nothing; write table and figures of what has ended")
    ] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="start the failed runs once more")] = False,
    max_hours: Annotated[
        float | None, typer.Option("--max-hours", min=0, help="start no run that would end after so many hours")
    ] = None,
    max_cost: Annotated[
        float | None, typer.Option("--max-cost", min=0, help="start no run that would cost more than this together")
    ] = None,
    yes: Yes = False,
    output: Output = Format.text,
) -> int:
    """Run everything that a campaign file asks for, and write a table and figures of it.

    The same command line again goes on: what has ended is kept, also what failed, and what was interrupted starts once
    more. Runs alternate between settings, so that a machine that changes over hours meets all of them alike.
    """
    store = Store()
    found = read_campaign(find_file(file))
    found = replace(
        found,
        clusters=tuple(clusters or found.clusters),
        max_hours=found.max_hours if max_hours is None else max_hours,
        max_cost=found.max_cost if max_cost is None else max_cost,
    )
    published = select_series(found.published)
    lots = _make_lots(found, store, MAX_CONFIRMED if yes or dry_run else MAX_MEMBERS)
    work = _Work(found, lots, store, [*_plan_all(lots, store, retry_failed, only_report or dry_run)])
    if dry_run:
        _print_plan(work, output)
        return 0
    stopped = None
    if not only_report:
        stopped = work.run_all(("mlbench", *context.obj))
    rows = make_rows(work.list_samples(), published)
    folder = _write_report(found, rows, work, to or Path(found.name))
    _print_report(found, rows, folder, output)
    if stopped is not None:
        console.note(f"Not all runs have started: {stopped}. To go on: mlbench campaign {file}, with a higher limit.")
        return BUDGET_SPENT
    return max((ended.exit_code for ended in work.ended), default=0)


def _make_lots(found: Campaign, store: Store, most: int) -> tuple[Lot, ...]:
    chosen = [store.cluster(name) for name in found.clusters] or [default_cluster(store)]
    entries = found.entries
    if len(chosen) == 1:
        entries = tuple((name, with_defaults(request, chosen[0])) for name, request in entries)
    return make_lots(replace(found, entries=entries), chosen, most=most)


def _plan_all(lots: Sequence[Lot], store: Store, retry_failed: bool, is_reading: bool) -> list[Plan]:
    """What is left of each lot's experiment. With `is_reading` a failed run is never planned once more."""
    plans = []
    for lot in lots:
        known = store.find_experiment(lot.name)
        experiment = known or Experiment(os.urandom(6).hex(), lot.name, now(), {})
        document = request_document(absolute_paths(lot.request))
        experiment = replace(experiment, request=document)
        retry = retry_failed and not is_reading
        plans.append(plan_experiment(experiment, lot.candidates, store, retry_failed=retry))
    return plans


@dataclass
class _Step:
    """One run of a campaign in its order."""

    lot: Lot
    plan: Plan
    candidate: Candidate
    run: Run
    is_left: bool


class _Work:
    """The runs of a campaign, and what became of them. `ended`: those that this client waited for or found."""

    def __init__(self, found: Campaign, lots: Sequence[Lot], store: Store, plans: Sequence[Plan]) -> None:
        self.campaign, self.lots, self.store, self.plans = found, lots, store, plans
        self.history = History(store)
        self.ended: list[Ended] = []
        by_lot = {id(lot): plan for lot, plan in zip(lots, plans, strict=True)}
        self.steps: list[_Step] = []
        for lot, candidate in interleave(lots):
            plan = by_lot[id(lot)]
            run = plan.runs[lot.candidates.index(candidate)]
            self.steps.append(_Step(lot, plan, candidate, run, any(run.id == left.id for left in plan.left)))

    @property
    def left(self) -> list[_Step]:
        return [step for step in self.steps if step.is_left]

    def forecast(self) -> Forecast:
        entries = [(step.candidate.spec, step.lot.cluster) for step in self.left]
        return forecast(entries, len(self.steps), self.history)

    def run_all(self, command_line: Sequence[str]) -> str | None:
        """Start and follow what is left, in order; why it stopped before the last run, None if it did not."""
        ahead = self.forecast()
        console.note(_describe_forecast(ahead))
        hours = self.campaign.max_hours
        budget = Budget(None if hours is None else hours * 3600, self.campaign.max_cost)
        write = document_writer(command_line)
        engines = {lot.cluster.name: engine_of(lot.cluster) for lot in self.lots}
        with ExitStack() as held:
            for plan in self.plans:
                if plan.left:
                    held.enter_context(queue.hold(plan.experiment, self.store))
                record(plan.experiment, plan.new, self.store, write)
            for number, step in enumerate(self.left, 1):
                estimate = self.history.estimate(step.candidate.spec, step.lot.cluster)
                if (refusal := budget.refusal(estimate)) is not None:
                    return refusal
                console.note(f"Run {number} of {ahead.left}: {step.run.name}")
                one = replace(step.plan, runs=(step.run,), new=(), left=(step.run,))
                [ended] = follow_all(one, lambda run: engines[run.spec.cluster], self.store, require_goal=False)
                self.ended.append(ended)
                self._book(step, ended, budget)
        return None

    def _book(self, step: _Step, ended: Ended, budget: Budget) -> None:
        result = ended.finished.result
        seconds = (result["wall_seconds"] if result else None) or 0.0
        amount = (result["price"] or {}).get("amount") if result else None
        budget.spend(seconds, amount or 0.0)
        if ended.finished.outcome.is_success and seconds:
            self.history.add(step.candidate.spec, seconds)
        if ended.exit_code:
            console.note(f"{step.run.name}: {ended.finished.summary}")

    def list_samples(self) -> list[Sample]:
        """What the runs that have ended say, in the order of the file."""
        samples = []
        for step in self.steps:
            finished = read_finished(step.run)
            if finished is None or finished.result is None:
                continue
            settings = settings_of(step.lot, step.candidate, self.lots)
            result: JsonObject = dict(finished.result)
            ranks = step.candidate.spec.world_size
            samples.append(read_sample(step.run.name, settings, ranks, result, self.campaign.metric))
        order = {id(lot): number for number, lot in enumerate(self.lots)}
        positions = {
            step.run.name: (order[id(step.lot)], step.lot.candidates.index(step.candidate)) for step in self.steps
        }
        return sorted(samples, key=lambda sample: positions[sample.run])


# --- output ---------------------------------------------------------------------------------------------------------


def _describe_forecast(ahead: Forecast) -> str:
    parts = [f"{ahead.runs} runs, {ahead.left} of them left"]
    if ahead.seconds:
        parts.append(f"about {console.duration(ahead.seconds)} for {ahead.left - ahead.unknown} of them")
    if ahead.unknown:
        parts.append(
            f"no run like {ahead.unknown} of them has ended yet (all deadlines together: "
            f"{console.duration(ahead.ceiling)})"
        )
    if ahead.price:
        parts.append(f"about {ahead.price:.2f} at the clusters' prices")
    return "; ".join(parts) + "."


def _print_plan(work: _Work, output: Format) -> None:
    ahead = work.forecast()
    estimates = [work.history.estimate(step.candidate.spec, step.lot.cluster) for step in work.steps]
    if output == Format.json:
        runs = [
            {
                "run": step.run.name,
                "cluster": step.lot.cluster.name,
                "workers": step.candidate.spec.workers,
                "settings": settings_of(step.lot, step.candidate, work.lots),
                "content_hash": step.candidate.content_hash,
                "left": step.is_left,
                "seconds": estimate.seconds,
                "price": estimate.price,
            }
            for step, estimate in zip(work.steps, estimates, strict=True)
        ]
        total = {"runs": ahead.runs, "left": ahead.left, "seconds": ahead.seconds, "price": ahead.price}
        console.out_json({"campaign": work.campaign.name, **total, "unknown": ahead.unknown, "list": runs})
        return
    for lot in work.lots:
        renderer_of(lot.cluster).render(lot.candidates[0].spec)
    console.out_table(
        ["RUN", "CLUSTER", "WORKERS", "SETTINGS", "STATE", "ABOUT"],
        [
            [
                step.run.name,
                step.lot.cluster.name,
                step.candidate.spec.workers,
                ", ".join(settings_of(step.lot, step.candidate, work.lots).values()),
                "left" if step.is_left else "done",
                console.duration(estimate.seconds) if estimate.seconds else "-",
            ]
            for step, estimate in zip(work.steps, estimates, strict=True)
        ],
        droppable=["CLUSTER", "ABOUT"],
    )
    console.note(_describe_forecast(ahead))


def _write_report(found: Campaign, rows: Sequence[Row], work: _Work, folder: Path) -> Path:
    document: JsonObject = {
        "schema_version": console.SCHEMA_VERSION,
        "campaign": found.name,
        "title": found.title,
        "metric": found.metric,
        "runs": [
            {"run": step.run.name, "id": step.run.id, "content_hash": step.candidate.content_hash}
            for step in work.steps
        ],
        "rows": to_document(rows),
    }
    import json

    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "campaign.json", (json.dumps(document, indent=1) + "\n").encode())
        write_atomically(folder / "campaign.csv", to_csv(rows).encode())
        write_atomically(folder / "campaign.md", to_markdown(found.title, rows).encode())
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror or error}.", hint="--to FOLDER") from None
    if any(cell.value for row in rows for cell in row.cells.values()):
        from mlbench_cli.results.figures.campaign import draw_campaign

        draw_campaign(found.title, rows, folder)
    return folder


def _print_report(found: Campaign, rows: Sequence[Row], folder: Path, output: Format) -> None:
    if output == Format.json:
        console.out_json({"campaign": found.name, "folder": str(folder), "rows": to_document(rows)})
    else:
        console.out(to_markdown(found.title, rows).rstrip())
    console.note(f"Table and figures: {folder}")
