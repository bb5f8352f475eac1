"""`mlbench campaign`: a file of many settings -> experiments -> runs in interleaved order -> table and figures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from mlbench_cli import console
from mlbench_cli.api import CampaignHandle, Client, FinishedRun, OpenExperiment, RunHandle
from mlbench_cli.commands._common import Format, Output, Yes
from mlbench_cli.commands._members import follow_run
from mlbench_cli.errors import UsageError
from mlbench_cli.files import write_atomically
from mlbench_cli.model import JsonObject
from mlbench_cli.results.analysis.campaign import Row, to_csv, to_document, to_markdown
from mlbench_cli.runs.campaign import Forecast, list_shipped
from mlbench_cli.runs.matrix import MAX_CONFIRMED, MAX_MEMBERS

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
    found = Client(notice=console.note).prepare_campaign(
        file,
        clusters=clusters or (),
        max_hours=max_hours,
        max_cost=max_cost,
        most=MAX_CONFIRMED if yes or dry_run else MAX_MEMBERS,
        retry_failed=retry_failed and not (only_report or dry_run),
    )
    if dry_run:
        _print_plan(found, output)
        return 0
    ended: list[FinishedRun] = []
    stopped = None if only_report else _run_all(found, ended, ("mlbench", *context.obj))
    rows = found.rows()
    folder = _write_report(found, rows, to or Path(found.campaign.name))
    _print_report(found, rows, folder, output)
    if stopped is not None:
        console.note(f"Not all runs have started: {stopped}. To go on: mlbench campaign {file}, with a higher limit.")
        return BUDGET_SPENT
    return max((finished.exit_code() for finished in ended), default=0)


def _run_all(found: CampaignHandle, ended: list[FinishedRun], command_line: Sequence[str]) -> str | None:
    """Start and follow what is left; what has ended is appended. Why it stopped before the last run, or None."""
    ahead = found.forecast()
    console.note(_describe_forecast(ahead))

    def follow(opened: OpenExperiment, run: RunHandle) -> FinishedRun:
        console.note(f"Run {len(ended) + 1} of {ahead.left}: {run.name}")
        finished = follow_run(opened, run)
        ended.append(finished)
        if finished.exit_code():
            console.note(f"{run.name}: {finished.summary}")
        return finished

    return found.run_all(follow, command_line)


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


def _print_plan(found: CampaignHandle, output: Format) -> None:
    ahead = found.forecast()
    estimates = [found.estimate(step) for step in found.steps]
    if output == Format.json:
        runs = [
            {
                "run": step.run.name,
                "cluster": step.lot.cluster.name,
                "workers": step.candidate.spec.workers,
                "settings": found.settings(step),
                "content_hash": step.candidate.content_hash,
                "left": step.is_left,
                "seconds": estimate.seconds,
                "price": estimate.price,
            }
            for step, estimate in zip(found.steps, estimates, strict=True)
        ]
        total = {"runs": ahead.runs, "left": ahead.left, "seconds": ahead.seconds, "price": ahead.price}
        console.out_json({"campaign": found.campaign.name, **total, "unknown": ahead.unknown, "list": runs})
        return
    found.render()
    console.out_table(
        ["RUN", "CLUSTER", "WORKERS", "SETTINGS", "STATE", "ABOUT"],
        [
            [
                step.run.name,
                step.lot.cluster.name,
                step.candidate.spec.workers,
                ", ".join(found.settings(step).values()),
                "left" if step.is_left else "done",
                console.duration(estimate.seconds) if estimate.seconds else "-",
            ]
            for step, estimate in zip(found.steps, estimates, strict=True)
        ],
        droppable=["CLUSTER", "ABOUT"],
    )
    console.note(_describe_forecast(ahead))


def _write_report(found: CampaignHandle, rows: Sequence[Row], folder: Path) -> Path:
    title = found.campaign.title
    document: JsonObject = {
        "schema_version": console.SCHEMA_VERSION,
        "campaign": found.campaign.name,
        "title": title,
        "metric": found.campaign.metric,
        "runs": [
            {"run": step.run.name, "id": step.run.run.id, "content_hash": step.candidate.content_hash}
            for step in found.steps
        ],
        "rows": to_document(rows),
    }
    import json

    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "campaign.json", (json.dumps(document, indent=1) + "\n").encode())
        write_atomically(folder / "campaign.csv", to_csv(rows).encode())
        write_atomically(folder / "campaign.md", to_markdown(title, rows).encode())
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror or error}.", hint="--to FOLDER") from None
    if any(cell.value for row in rows for cell in row.cells.values()):
        from mlbench_cli.results.figures.campaign import draw_campaign

        draw_campaign(title, rows, folder)
    return folder


def _print_report(found: CampaignHandle, rows: Sequence[Row], folder: Path, output: Format) -> None:
    if output == Format.json:
        console.out_json({"campaign": found.campaign.name, "folder": str(folder), "rows": to_document(rows)})
    else:
        console.out(to_markdown(found.campaign.title, rows).rstrip())
    console.note(f"Table and figures: {folder}")
