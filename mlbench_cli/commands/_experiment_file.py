"""`mlbench run -f` of a file with `runs`: settings -> experiments -> runs in interleaved order -> table and figures."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mlbench_cli import console
from mlbench_cli.api import CampaignHandle, Client, FinishedRun, OpenExperiment, RunHandle
from mlbench_cli.commands._common import Format
from mlbench_cli.commands._members import follow_run
from mlbench_cli.config.settings import data_dir
from mlbench_cli.errors import UsageError
from mlbench_cli.model.run import JsonObject
from mlbench_cli.results.analysis.campaign import Row, to_csv, to_document, to_markdown
from mlbench_cli.runs.campaign import Forecast
from mlbench_cli.runs.matrix import MAX_CONFIRMED, MAX_MEMBERS
from mlbench_cli.util.files import write_atomically

BUDGET_SPENT = 124
TABLES = "tables"  # folder of the data folder, for tables and figures by the name of their file


class Limits(NamedTuple):
    """What goes before the file's own keys: clusters to run on, hours, and cost in the currency of the prices."""

    clusters: Sequence[str] = ()
    max_hours: float | None = None
    max_cost: float | None = None


class How(NamedTuple):
    """What is done with the runs of a file."""

    dry_run: bool = False
    only_report: bool = False
    retry_failed: bool = False
    yes: bool = False


def run_file(file: str, limits: Limits, how: How, to: Path | None, output: Format, command_line: Sequence[str]) -> int:
    """Run everything that a file asks for, then write a table and figures of the results; the exit code.

    Called again it resumes: finished and failed runs are kept, interrupted runs start again. Runs alternate between
    settings, so slow drift of the machine affects all settings equally.
    """
    found = Client(notice=console.note).prepare_campaign(
        file,
        **limits._asdict(),
        most=MAX_CONFIRMED if how.yes or how.dry_run else MAX_MEMBERS,
        retry_failed=how.retry_failed and not (how.only_report or how.dry_run),
    )
    if how.dry_run:
        _print_plan(found, output)
        return 0
    ended: list[FinishedRun] = []
    stopped = None if how.only_report else _run_all(found, ended, command_line)
    rows = found.rows()
    folder = _write_report(found, rows, to or data_dir() / TABLES / found.campaign.name)
    _print_report(found, rows, folder, output)
    if stopped is not None:
        console.note(f"Not all runs have started: {stopped}. To resume: mlbench run -f {file}, with a higher limit.")
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
    parts = [f"{ahead.left} of {ahead.runs} runs to do"]
    if ahead.seconds:
        parts.append(f"about {console.duration(ahead.seconds)} for {ahead.left - ahead.unknown} of them")
    if ahead.unknown:
        parts.append(
            f"no estimate for {ahead.unknown} of them (sum of their timeouts: {console.duration(ahead.ceiling)})"
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
        raise UsageError(f"cannot write to {folder}: {error.strerror or error}.", hint="--to FOLDER") from None
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
