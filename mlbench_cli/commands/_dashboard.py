"""`--dashboard-url`: everyday commands against a shared dashboard, through its REST API."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from mlbench_cli import console
from mlbench_cli.commands._common import Format, make_folder, print_answer
from mlbench_cli.errors import (
    CleanupError,
    DeadlineError,
    NotFoundError,
    Stopped,
    UnreachableError,
    UsageError,
    explain_stop,
)
from mlbench_cli.model.run import DAMAGED, JsonObject, Outcome, RunState
from mlbench_cli.results.analysis.numbers import SECONDS, format_goal, format_value
from mlbench_cli.runs.snapshot import ENDED, find_metric
from mlbench_cli.util.times import parse_timestamp

if TYPE_CHECKING:
    from mlbench_cli.api.dashboard import RemoteDashboard
    from mlbench_cli.runs.request import Request

POLL_SECONDS = 2.0
ARCHIVE_SECONDS = 60.0  # in which the dashboard's machine completes the archive of a run that has ended
DEFAULT_FILE = Path("results.zip")
MAX_RUNS = 1000  # the most that the dashboard lists at once


def dashboard_url_option(panel: str | None = None) -> Any:
    """`--dashboard-url`."""
    return typer.Option(
        "--dashboard-url",
        "-u",
        metavar="URL",
        help="talk to this shared dashboard instead; its token: ?token=... in the URL, or MLBENCH_DASHBOARD_TOKEN",
        rich_help_panel=panel,
    )


DashboardUrl = Annotated[str | None, dashboard_url_option()]


class LinePrinter(Protocol):
    """Writes the log lines of ranks, as `logs.Printer` does."""

    def write(self, rank: int, text: bytes) -> None:
        """Write one line of a rank."""

    def flush(self) -> None:
        """Flush the lines."""


def connect(context: typer.Context, url: str, *usable: str) -> "RemoteDashboard":
    """The dashboard at `url`. Raises UsageError for options on the command line that are not `usable` with it."""
    known = {"context", "dashboard", "output", "names", *usable}
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE" and parameter.name not in known:
            word = next((word for word in parameter.opts if word.startswith("--")), parameter.human_readable_name)
            raise UsageError(f"{word} does not work with --dashboard-url.", hint=f"mlbench {context.info_name} --help")
    from mlbench_cli.api.dashboard import RemoteDashboard  # it loads http, email and ssl

    dashboard = RemoteDashboard(url)
    if dashboard.is_exposed:
        console.warn(f"{dashboard.host} is contacted without TLS, so others on the network can read the token.")
    return dashboard


@contextmanager
def _understood(dashboard: "RemoteDashboard") -> Iterator[None]:
    """Answers of another mlbench version may lack fields."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnreachableError(
            f"{dashboard.host} sent an answer that this mlbench does not understand ({type(error).__name__}: "
            f"{str(error)[:100]}).",
            hint="Use the mlbench version of the dashboard.",
        ) from None


def _ask_of_either(ask: Callable[[str], JsonObject], name: str, action: str = "") -> tuple[JsonObject, bool]:
    """The answer about the run of that name, else about the experiment; whether it is a run. Raises NotFoundError."""
    try:
        return ask(f"runs/{name}{action}"), True
    except NotFoundError as missing:
        try:
            return ask(f"experiments/{name}{action}"), False
        except NotFoundError:
            raise missing from None


# --- reading --------------------------------------------------------------------------------------------------------


def find_runs(dashboard: "RemoteDashboard", names: Sequence[str]) -> list[JsonObject]:
    """The runs of some names, in detail; a name is that of a run or of an experiment. Raises NotFoundError."""
    found: dict[str, JsonObject] = {}
    for name in names:
        document, is_run = _ask_of_either(dashboard.get, name)
        members = () if is_run else [member["run"] for member in document["members"] if member.get("run")]
        documents = [document] if is_run else [dashboard.get(f"runs/{member}") for member in members]
        found |= {str(document["name"]): document for document in documents}
    return list(found.values())


def show_status(
    dashboard: "RemoteDashboard",
    names: Sequence[str],
    output: Format,
    *,
    limit: int,
    state: str | None,
    task: str | None,
    since: float | None,
    show: Callable[[JsonObject], None],
    show_rows: Callable[[Sequence[JsonObject]], None],
    metric: str | None = None,
    watch: bool = False,
) -> None:
    """`mlbench status`: one run in detail by `show`, several by `show_rows`."""
    with _understood(dashboard):
        if names:
            if watch:
                _wait(dashboard, names, None)
            runs = find_runs(dashboard, names)
        else:
            answer = dashboard.get("runs", limit=min(limit or MAX_RUNS, MAX_RUNS), state=state, task=task)
            runs = [run for run in answer["runs"] if since is None or parse_timestamp(run["created"]) >= since]
        if metric is not None:
            if len(runs) != 1:
                raise UsageError("--metric is about one run.", hint="mlbench status NAME --metric METRIC")
            runs[0]["metric"] = {"name": metric, "value": find_metric(runs[0]["metrics"], metric)}
        if output is Format.json:
            console.out_json(runs[0] if len(runs) == 1 and names else {"runs": runs})
        elif len(runs) == 1 and names:
            show({**runs[0], "folder": None})  # it is on the machine of the dashboard
        elif runs:
            show_rows(runs)
        else:
            console.note(f"{dashboard.host} has no such runs.")


def show_clusters(dashboard: "RemoteDashboard", output: Format) -> None:
    """`mlbench list-clusters`."""
    with _understood(dashboard):
        clusters = dashboard.get("clusters")["clusters"]
        if output is Format.json:
            console.out_json({"clusters": clusters})
        else:
            rows = [[cluster["name"], cluster["provider"], cluster["state"]] for cluster in clusters]
            console.out_table(["CLUSTER", "PROVIDER", "STATE"], rows)


def show_logs(
    dashboard: "RemoteDashboard",
    names: Sequence[str],
    output: Format,
    printer: Callable[[bool], LinePrinter],
    *,
    rank: int | None,
    follow: bool,
    raw: bool,
    tail: int | None,
) -> None:
    """`mlbench logs`: rank by rank; with `follow` the new lines of all ranks until the run ends."""
    with _understood(dashboard):
        runs = find_runs(dashboard, names)
        documents = []
        for run in runs:
            ranks = list(range(int(run["world_size"]))) if rank is None else [rank]
            reader = _LogReader(dashboard, str(run["name"]), ranks, raw)
            lines = list(reader.read())
            lines = lines if tail is None else lines[len(lines) - tail :] if tail else []
            if output is Format.json:
                shown = [{"rank": each, "text": text} for each, text in lines]
                documents.append({"name": run["name"], "lines": shown})
                continue
            if len(runs) > 1:
                console.note(f"--- {run['name']} ---")
            out = printer(len(ranks) > 1)
            _write_lines(out, lines)
            while follow and not _has_ended(run):
                time.sleep(POLL_SECONDS)
                run = dashboard.get(f"runs/{run['name']}")  # before the log, so that its last lines are not missed
                _write_lines(out, reader.read(is_last=_has_ended(run)))
        if output is Format.json:
            console.out_json({"runs": documents} if len(runs) != 1 else documents[0])


def _write_lines(out: LinePrinter, lines: Iterable[tuple[int, str]]) -> None:
    for rank, text in lines:
        out.write(rank, text.encode("utf-8", "surrogateescape") + b"\n")
    out.flush()


class _LogReader:
    """Reads the logs of some ranks page by page, from where the last reading stopped."""

    def __init__(self, dashboard: "RemoteDashboard", name: str, ranks: Sequence[int], raw: bool) -> None:
        self._dashboard, self._name, self._raw = dashboard, name, raw
        self._offsets = dict.fromkeys(ranks, 0)

    def read(self, *, is_last: bool = True) -> Iterator[tuple[int, str]]:
        """Rank and text of each new line; unless `is_last`, a line without its end is left for later."""
        for rank in self._offsets:
            while True:
                offset = self._offsets[rank]
                raw = "true" if self._raw else "false"
                page = self._dashboard.get(f"runs/{self._name}/logs", rank=rank, offset=offset, raw=raw)
                lines, end = page["lines"], int(page["end"])
                if not is_last and page["cut"] is not None:
                    lines, end = lines[:-1], int(page["cut"])
                yield from ((rank, str(line)) for line in lines)
                self._offsets[rank] = end
                if end <= offset or int(page["end"]) >= int(page["size"]):
                    break


# --- waiting --------------------------------------------------------------------------------------------------------


def _has_ended(run: JsonObject) -> bool:
    return run["state"] in (str(RunState.FINISHED), ENDED, DAMAGED)


def wait_for(
    dashboard: "RemoteDashboard", names: Sequence[str], output: Format, *, timeout: float | None, require_goal: bool
) -> int:
    """`mlbench wait`: the highest exit code of the runs, whose ends it prints."""
    with _understood(dashboard):
        runs = _wait(dashboard, names, timeout)
        codes = [_exit_code(run, require_goal) for run in runs]
        if output is Format.json:
            console.out_json({"runs": [{**run, "exit_code": code} for run, code in zip(runs, codes, strict=True)]})
        else:
            rows = [[*_ended_row(run), code] for run, code in zip(runs, codes, strict=True)]
            console.out_table(
                ["RUN", "WORKERS", "OUTCOME", "GOAL", "TOTAL", "EXIT"], rows, droppable=["TOTAL", "EXIT", "GOAL"]
            )
        for run in runs:
            for finding in run.get("findings") or ():
                console.note(f"{run['name']}: {finding['summary']}")
        if runs and not any(codes):
            console.note(f"Next: mlbench download {runs[0]['name']} --dashboard-url URL")
        return max(codes, default=0)


def _wait(dashboard: "RemoteDashboard", names: Sequence[str], timeout: float | None) -> list[JsonObject]:
    deadline = None if timeout is None else time.monotonic() + timeout
    line = console.ProgressLine()
    ended: float | None = None  # all runs had ended, but an archive was incomplete
    try:
        while True:
            runs = find_runs(dashboard, names)
            running = [run for run in runs if not _has_ended(run)]
            sealing = [run for run in runs if run["state"] == ENDED]
            if not running and not sealing:
                return runs
            if not running:
                ended = ended or time.monotonic()
                if time.monotonic() - ended >= ARCHIVE_SECONDS:
                    return runs
                running = sealing
            if deadline is not None and time.monotonic() >= deadline:
                raise DeadlineError(
                    f"{len(running)} of {len(runs)} runs have not ended after {console.duration(timeout)}: "
                    f"{', '.join(str(run['name']) for run in running[:3])}. They continue.",
                    hint=f"mlbench wait {' '.join(names)} --dashboard-url URL",
                )
            phase = (running[0].get("progress") or {}).get("phase") or running[0]["state"]
            more = f", and {len(running) - 1} more" if len(running) > 1 else ""
            line.update(f"{running[0]['name']}: {phase}{more}")
            time.sleep(POLL_SECONDS)
    except (KeyboardInterrupt, Stopped) as stopped:
        hint = f"mlbench wait {' '.join(names)} --dashboard-url URL"
        raise explain_stop(stopped, "Stopped waiting; the runs continue.", hint) from None
    finally:
        line.close()


def _exit_code(run: JsonObject, require_goal: bool) -> int:
    if run["state"] != RunState.FINISHED or run["outcome"] is None:
        return CleanupError.exit_code  # ended without a complete archive
    is_reached = run["outcome"] == Outcome.GOAL_REACHED
    return Outcome(run["outcome"]).exit_code(require_goal=require_goal, goal_reached=is_reached)


def _ended_row(run: JsonObject) -> list[object]:
    elapsed = (run.get("progress") or {}).get("elapsed")
    return [
        run["name"],
        run["workers"],
        run["outcome"] or run["state"],
        format_goal(run.get("goal"), run["outcome"]),
        None if elapsed is None else format_value(elapsed, SECONDS),
    ]


# --- acting ---------------------------------------------------------------------------------------------------------


def start_run(
    dashboard: "RemoteDashboard", request: "Request", output: Format, *, detach: bool, dry_run: bool, require_goal: bool
) -> int:
    """`mlbench run`: start the runs there and, unless `detach`, wait for their end."""
    from mlbench_cli.runs.request import request_document

    with _understood(dashboard):
        answer = dashboard.post("runs", request_document(request), check="true" if dry_run else None)
        if dry_run or detach:
            print_answer(output, answer, "\n".join(str(name) for name in answer["runs"]))
            if not dry_run:
                console.note(
                    f"Started on {dashboard.host}. Next: mlbench wait {answer['experiment']} --dashboard-url URL"
                )
            return 0
        console.note(f"Started on {dashboard.host}: {', '.join(answer['runs'])}. Ctrl-C stops waiting, not the runs.")
    return wait_for(dashboard, [str(answer["experiment"])], output, timeout=None, require_goal=require_goal)


def cancel_runs(dashboard: "RemoteDashboard", names: Sequence[str], output: Format) -> None:
    """`mlbench cancel`."""
    with _understood(dashboard):
        answers = []
        for name in names:
            answer, is_run = _ask_of_either(dashboard.post, name, "/cancel")
            text = f"{name}: {answer['summary']}" if is_run else f"Canceled the experiment {name}."
            answers.append(answer)
            if output is not Format.json:
                console.out(console.clean(text))
        if output is Format.json:
            console.out_json({"runs": answers})


def download_runs(
    dashboard: "RemoteDashboard", names: Sequence[str], target: Path | None, *, force: bool, as_json: bool
) -> None:
    """`mlbench download`: one archive to a file, several to a folder."""
    with _understood(dashboard):
        files = choose_files([str(run["name"]) for run in find_runs(dashboard, names)], target, force=force)
        documents = []
        for run, file in files.items():
            size = dashboard.download(run, file)
            documents.append({"run": run, "file": str(file.absolute()), "format": "archive", "bytes": size})
            if not as_json:
                console.out(str(file))
                console.note(f"{console.size(size)}. Next: mlbench verify {file}")
        if as_json:
            console.out_json(documents[0] if len(documents) == 1 else {"runs": documents})


def choose_files(runs: Sequence[str], to: Path | None, *, force: bool) -> dict[str, Path]:
    """The file of each run: `to`, or one in that folder. Raises UsageError for one file of several runs, or one that
    exists."""
    folder = to or Path()
    if len(runs) == 1:
        path = to or DEFAULT_FILE
        files = {runs[0]: path / f"{runs[0]}.zip" if path.is_dir() else path}
    elif folder.suffix == ".zip" or (folder.exists() and not folder.is_dir()):
        raise UsageError(f"{len(runs)} runs do not fit into one file, {folder}.", hint="Name a folder with --to.")
    else:
        make_folder(folder)
        files = {run: folder / f"{run}.zip" for run in runs}
    for file in files.values():
        if file.exists() and not force:
            raise UsageError(f"{file} exists.", hint="Add --force to replace it, or choose another file with --to.")
    return files


def require_names(names: Sequence[str] | None, command: str) -> list[str]:
    """The names on the command line. Raises UsageError without any."""
    if not names:
        raise UsageError("No run given.", hint=f"mlbench {command} NAME --dashboard-url URL")
    if bad := [name for name in names if not name.isprintable() or "/" in name]:
        raise UsageError(f'"{bad[0][:60]}" is not a valid run name.', hint="mlbench status --dashboard-url URL")
    return list(names)
