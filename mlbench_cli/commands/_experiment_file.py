"""`mlbench run -f` of a file with `runs`: its experiment, followed run by run, then its table and figures."""

from collections.abc import Sequence
from pathlib import Path

from mlbench_cli import console
from mlbench_cli.api import Client, ExperimentHandle, FinishedRun, Launch
from mlbench_cli.commands._common import Format, print_answer
from mlbench_cli.commands._members import How, follow_run, start_detached
from mlbench_cli.config.settings import data_dir
from mlbench_cli.errors import naming_file_on_os_error
from mlbench_cli.model.run import JsonObject
from mlbench_cli.results.analysis.series import Row, name_settings
from mlbench_cli.results.figures.experiment import draw_experiment, to_csv, to_document, to_markdown
from mlbench_cli.runs.launch import local_machine
from mlbench_cli.runs.matrix import MAX_CONFIRMED, MAX_MEMBERS
from mlbench_cli.util.files import write_atomically
from mlbench_cli.util.json_text import format_parsed

TABLES = "tables"  # folder of the data folder, for tables and figures by the name of their file


def run_file(file: str, clusters: Sequence[str], how: How, *, yes: bool, only_report: bool, to: Path | None) -> int:
    """Run everything that a file asks for, then write a table and figures of the results; the exit code.

    `file` is a path, the name of a shipped file, or that of an experiment which a file described. Called again it
    resumes: finished and failed runs are kept, interrupted runs start again.
    """
    client = Client(notice=console.note)
    most = MAX_CONFIRMED if yes or how.dry_run else MAX_MEMBERS
    launch = client.prepare_file(file, clusters=clusters, most=most, only_list=how.dry_run)
    if how.dry_run:
        if not local_machine().gpus and any(spec.engine == "local" and spec.device == "gpu" for spec in launch.specs):
            console.warn("This machine has no GPU, so it cannot start these runs: choose a cluster with --cluster.")
        _print_plan(launch, how.output)
        return 0
    if how.detach:
        with launch.open(how.command_line, retry_failed=how.retry_failed) as opened:
            opened.record()
            code = start_detached(opened, how.output)
        console.note(f"Table and figures, once the runs have ended: mlbench run {launch.experiment.name} --only-report")
        return code
    ended: list[FinishedRun] = []
    if not only_report:
        _run_all(launch, ended, how)
    experiment = launch.handle if only_report else client.find_experiment(launch.experiment.name)
    rows = experiment.table()
    folder = _write_report(experiment, rows, to or data_dir() / TABLES / experiment.name)
    table = str(folder) if console.is_quiet() else to_markdown(experiment.title, rows).rstrip()
    print_answer(how.output, {"experiment": experiment.name, "folder": str(folder), "rows": to_document(rows)}, table)
    console.note(f"Table and figures: {folder}")
    return max((finished.exit_code() for finished in ended), default=0)


def _run_all(launch: Launch, ended: list[FinishedRun], how: How) -> None:
    """Start and follow the remaining runs, and append those that end."""
    with launch.open(how.command_line, retry_failed=how.retry_failed) as opened:
        opened.record()
        left = opened.left
        console.note(f"{len(left)} of {len(opened.runs)} runs to do.")
        for number, run in enumerate(left, start=1):
            console.note(f"Run {number} of {len(left)}: {run.name}")
            finished = follow_run(opened, run)
            ended.append(finished)
            if finished.exit_code():
                console.note(f"{run.name}: {finished.summary}")


# --- output ---------------------------------------------------------------------------------------------------------


def _print_plan(launch: Launch, output: Format) -> None:
    plan = launch.plan()
    left = {run.id for run in plan.left}
    settings = name_settings([(candidate.spec.task, candidate.point) for candidate in launch.candidates])
    rows = list(zip(plan.runs, launch.candidates, settings, strict=True))
    if output == Format.json:
        runs = [
            {
                "name": run.name,
                "cluster": candidate.spec.cluster,
                "workers": candidate.spec.workers,
                "settings": named,
                "content_hash": candidate.content_hash,
                "left": run.id in left,
            }
            for run, candidate, named in rows
        ]
        console.out_json({"experiment": plan.experiment.name, "runs": runs})
        return
    launch.render_one_each()
    console.out_table(
        ["RUN", "CLUSTER", "WORKERS", "SETTINGS", "STATE"],
        [
            [
                run.name,
                candidate.spec.cluster,
                candidate.spec.workers,
                ", ".join(named.values()),
                "left" if run.id in left else "done",
            ]
            for run, candidate, named in rows
        ],
        droppable=["CLUSTER"],
    )
    console.note(f"{len(left)} of {len(plan.runs)} runs to do.")


def _write_report(experiment: ExperimentHandle, rows: Sequence[Row], folder: Path) -> Path:
    title, members = experiment.title, {member.run_id: member for member in experiment.experiment.members}
    document: JsonObject = {
        "schema_version": console.SCHEMA_VERSION,
        "experiment": experiment.name,
        "title": title,
        "metric": experiment.experiment.request.get("metric"),
        "runs": [
            {"name": run.name, "id": run.run.id, "content_hash": members[run.run.id].content_hash}
            for run in experiment.runs()
        ],
        "rows": to_document(rows),
    }
    with naming_file_on_os_error(folder, "written"):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "table.json", format_parsed(document))
        write_atomically(folder / "table.csv", to_csv(rows).encode())
        write_atomically(folder / "table.md", to_markdown(title, rows).encode())
    if any(row.value(workers) for row in rows for workers in row.points):
        draw_experiment(title, rows, folder)
    return folder
