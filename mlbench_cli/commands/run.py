"""`mlbench run`: request -> specs -> recorded runs -> submitted and followed, one size after the other."""

import inspect
import shutil
from collections.abc import Callable, Sequence
from dataclasses import Field, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from mlbench_cli import console
from mlbench_cli.commands._common import (
    Format,
    Output,
    RequireGoal,
    Yes,
    complete_backends,
    complete_clusters,
    complete_presets,
    complete_tasks,
    default_cluster,
    engine_of,
    renderer_of,
    with_defaults,
)
from mlbench_cli.commands._repeats import repeats_in
from mlbench_cli.commands._report import Ended, Reporter, in_words, report_ended
from mlbench_cli.engines.base import Engine, Submission
from mlbench_cli.errors import MlbenchError, Stopped, UsageError, explain_stop
from mlbench_cli.model import Cluster, Outcome, Run, RunState
from mlbench_cli.results.archive.documents import write_run_document
from mlbench_cli.runs import launch
from mlbench_cli.runs.request import OPTIONS, Request, equivalent_command, flag, merge, pairs, read_file
from mlbench_cli.spec import RunSpec
from mlbench_cli.store import Store

STOP_SECONDS = 1.0  # in which a stopped client waits for the end of a run that it cancels


def run(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="name; the run with N workers is named NAME-N")
    ] = None,
    workers: Annotated[
        list[int] | None, typer.Argument(metavar="[N]...", help="numbers of workers, e.g. 1 2 4")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="YAML file with these options; flags take precedence")
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="start and return at once; on local, runs are queued")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print what would be submitted, and exit")] = False,
    require_goal: RequireGoal = False,
    logs: Annotated[bool, typer.Option("--logs", help="show the log lines of rank 0 while it runs")] = False,
    yes: Yes = False,
    output: Output = Format.text,
    **options: Any,
) -> int:
    """Run a task, or a command of your own, with one or several numbers of workers.

    Asks on a terminal for what is missing. Several numbers run one after the other. The exit code is 0 if all went
    well, else the highest one. Defaults of options: mlbench config.
    """
    store = Store()
    request, cluster = _complete(_request(name, workers, file, options), store, ask=not yes, is_dry=dry_run)
    specs = launch.resolve(request, cluster)
    engine = renderer_of(cluster) if dry_run else engine_of(cluster)
    submissions = [engine.render(spec) for spec in specs]
    if dry_run:
        _print_submissions(submissions, output)
        return 0
    _warn(specs, cluster)
    runs = _record(specs, store, ("mlbench", *context.obj))
    if detach:
        code = _start(runs, engine, store, output)
    else:
        ended = [_follow(runs, number, engine, store, require_goal, logs) for number in range(len(runs))]
        names = {item.name for item in runs}
        repeats = repeats_in(row for row in store.runs() if row.run.name in names) if request.repeat else []
        report_ended(ended, output, repeats)
        code = max(item.exit_code for item in ended)
    console.note(f"The same again: {equivalent_command(request)}")
    return code


# --- what is asked for ----------------------------------------------------------------------------------------------


def _complete(request: Request, store: Store, *, ask: bool, is_dry: bool) -> tuple[Request, Cluster]:
    """The request with defaults and answers, and its cluster. Raises UsageError naming what is missing."""
    cluster = store.cluster(request.cluster) if request.cluster else default_cluster(store)
    taken = () if is_dry else [row.run.name for row in store.runs()]
    missing = _missing(request)
    if request.name is not None:
        launch.check_names(request if request.workers else replace(request, workers=(1,)), taken)
    if missing and not (ask and console.interactive()):
        reason = ", and there is no terminal to prompt on" if ask else ""
        raise UsageError(
            f"No {', no '.join(missing)} given{reason}.",
            hint=f"mlbench run {request.name or 'NAME'} 1 2 4 --task TASK [--backend NAME], "
            "or --command 'python train.py' [--image NAME:TAG]",
        )
    if missing:
        from mlbench_cli.runs import wizard

        request, cluster = wizard.complete(request, store.clusters(), cluster, taken, with_defaults)
    else:
        request = with_defaults(request, cluster)
    if cluster.provider != "local" and request.cluster is None:
        request = replace(request, cluster=cluster.name)
    if missing:
        console.note(f"\nThe same without questions: {equivalent_command(request)}\n")
    return request, cluster


def _missing(request: Request) -> list[str]:
    """What a run cannot do without."""
    missing = []
    if request.name is None:
        missing.append("name")
    if not request.workers:
        missing.append("number of workers")
    if request.task is None and request.command is None:
        missing.append("task or command")
    return missing


# --- the options are Request's fields -------------------------------------------------------------------------------


def _parameter(item: "Field[Any]") -> inspect.Parameter:
    """A field of Request as a parameter that Typer makes an option of."""
    facts = item.metadata
    repeated = facts["kind"] in ("texts", "pairs")
    kind: Any = {"integer": int, "switch": bool}.get(facts["kind"], list[str] if repeated else str)
    long = f"{flag(item.name)}/{flag('no_' + item.name)}" if facts["kind"] == "switch" else flag(item.name)
    complete: dict[str, Callable[..., list[str]]] = {
        "task": complete_tasks,
        "preset": complete_presets,
        "backend": complete_backends,
        "cluster": complete_clusters,
    }
    option = typer.Option(
        *([long, f"-{facts['letter']}"] if facts["letter"] else [long]),
        help=facts["help"],
        metavar=facts["metavar"] or None,
        rich_help_panel=facts["panel"],
        autocompletion=complete.get(item.name),
    )
    return inspect.Parameter(
        item.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


_signature = inspect.signature(run)
run.__signature__ = _signature.replace(  # type: ignore[attr-defined]
    parameters=[
        *(entry for entry in _signature.parameters.values() if entry.kind is not inspect.Parameter.VAR_KEYWORD),
        *(_parameter(item) for item in OPTIONS),
    ]
)


def _request(name: str | None, workers: list[int] | None, file: Path | None, options: dict[str, Any]) -> Request:
    values = {key: value for key, value in options.items() if value not in (None, [])}
    for item in OPTIONS:
        if item.name in values and item.metadata["kind"] == "pairs":
            values[item.name] = pairs(values[item.name], item.name)
        elif item.name in values and item.metadata["kind"] == "texts":
            values[item.name] = tuple(values[item.name])
    sizes = tuple(workers or ())
    if name is not None and name.isascii() and name.isdecimal():  # no name begins with a digit
        if file is None:
            raise UsageError(f"{name} is no name of a run: NAME comes before the numbers.", hint="mlbench run NAME 1 2")
        sizes = (int(name[:9]), *sizes)
        name = None
    given = Request(name=name, workers=sizes, **values)
    return given if file is None else merge(read_file(file), given)


# --- the way of a run -----------------------------------------------------------------------------------------------


def _print_submissions(submissions: list[Submission], output: Format) -> None:
    if output == Format.json:
        documents = [{"run": item.spec.name, "documents": list(item.documents)} for item in submissions]
        console.out_json({"submissions": documents})
        return
    import templates

    console.out(templates.dump(document for item in submissions for document in item.documents).rstrip())


def _warn(specs: tuple[RunSpec, ...], cluster: Cluster) -> None:
    if cluster.provider != "local":
        return
    cores = launch.local_machine().cores
    crowded = [spec for spec in specs if spec.world_size > cores]
    if crowded:
        names = ", ".join(spec.name for spec in crowded)
        console.warn(f"{names}: more ranks than this machine's {cores} cores; their times say little about scaling.")


def _record(specs: tuple[RunSpec, ...], store: Store, command_line: Sequence[str]) -> list[Run]:
    """Record all runs, with their provenance in their folders, before the first one starts; all of them or none."""
    from mlbench_cli.provenance import collect_provenance

    provenance = collect_provenance(specs[0], command_line).to_dict()  # the same program for all
    runs: list[Run] = []
    try:
        for spec in specs:
            runs.append(store.record_run(spec))
            write_run_document(runs[-1], provenance)
    except BaseException:
        _forget(runs, store)
        raise
    return runs


def _forget(runs: list[Run], store: Store) -> None:
    for item in runs:
        store.forget_run(item)
        shutil.rmtree(item.folder, ignore_errors=True)  # nothing of it has been started


def _start(runs: list[Run], engine: Engine, store: Store, output: Format) -> int:
    if engine.dies_with_client and (len(runs) > 1 or _waits_for_machine(runs[0])):
        _start_in_turn(runs, store)
    else:
        _start_all(runs, engine, store)
    if output == Format.json:
        console.out_json({"runs": [{"name": item.name, "id": item.id, "folder": str(item.folder)} for item in runs]})
    else:
        console.out("\n".join(item.name for item in runs))
    name = runs[0].name
    console.note(
        f"Next: mlbench status {name}, mlbench logs {name} --follow, mlbench wait {name}, mlbench cancel {name}"
    )
    return 0


def _waits_for_machine(item: Run) -> bool:
    """Whether a local run cannot start at once because another one has this machine; says which."""
    from mlbench_cli.engines.local.machine_lock import find_holder

    holder = None if item.spec.share_machine else find_holder()
    if holder is not None:
        console.note(f"{item.name} waits for this machine: {holder.phrase}.")
    return holder is not None


def _start_in_turn(runs: list[Run], store: Store) -> None:
    from mlbench_cli.runs import queue as background

    try:
        background.start(runs)
    except BaseException:
        _forget(runs, store)  # nothing of them has been started
        raise
    console.note(f"Runs started with names {', '.join(item.name for item in runs)}: one after the other.")


def _start_all(runs: list[Run], engine: Engine, store: Store) -> None:
    for number, item in enumerate(runs):
        try:
            _submit(item, engine, store, detach=True)
        except BaseException:
            _forget(runs[number + 1 :], store)  # this one stays: it may have left something
            raise
        console.note(f"Run started with name {item.name}")
        _announce_keeping(item)


def _submit(item: Run, engine: Engine, store: Store, *, detach: bool) -> None:
    try:
        engine.submit(item, engine.render(item.spec), detach=detach)
    except MlbenchError:
        console.note(
            f"{item.name} stays recorded, with what there may be of it. To forget it: mlbench delete {item.name}"
        )
        raise
    store.update_run(item, RunState.RUNNING)


def _follow(runs: list[Run], number: int, engine: Engine, store: Store, require_goal: bool, logs: bool) -> Ended:
    from mlbench_cli.runs import supervise

    item, later = runs[number], runs[number + 1 :]
    try:
        _submit(item, engine, store, detach=False)
        _announce(item, engine)
        with Reporter(item, engine if logs else None) as report:
            finished = supervise.follow(item, engine, store, report=report, notice=console.note)
        if later:
            console.note(finished.summary)
    except (KeyboardInterrupt, Stopped) as stopped:
        _forget(later, store)
        raise _stop(item, engine, store, later, stopped) from None
    except BaseException:
        _forget(later, store)
        raise
    return Ended(finished, finished.exit_code(require_goal=require_goal))


def _announce(item: Run, engine: Engine) -> None:
    interrupt = "cancels it and keeps what there is" if engine.dies_with_client else "leaves it running"
    console.note(f"Run started with name {item.name}: {in_words(item.spec)}.")
    if item.spec.functional_only:
        console.note(f"Its result is functional, not a performance measurement: {item.spec.functional_only}.")
    console.note(f"Ctrl-C {interrupt}. It is stopped after {console.duration(item.spec.timeout)}.")
    _announce_keeping(item)


def _announce_keeping(item: Run) -> None:
    """Until when the results can be fetched, of a run that a cluster executes."""
    options = item.spec.kubernetes
    if item.spec.engine != "kubernetes":
        return
    if options.keep_seconds:
        console.note(f"The cluster keeps its results for {console.duration(options.keep_seconds)} after its end.")
    else:
        console.note(f"Its workers hold its results for {console.duration(options.hold_seconds)} after its end.")


def _stop(item: Run, engine: Engine, store: Store, later: list[Run], stopped: BaseException) -> Stopped:
    """What is true of a run whose client was stopped: it had ended, it is cancelled with its client, or it goes on."""
    from mlbench_cli.runs import supervise
    from mlbench_cli.runs.finished import read_finished

    never = f" Not started: {', '.join(run.name for run in later)}." if later else ""
    if (finished := read_finished(item)) is not None:
        return explain_stop(
            stopped, f"{finished.summary} Its archive is complete.{never}", f"mlbench status {item.name}"
        )
    if not engine.dies_with_client:
        return explain_stop(
            stopped,
            f'The run "{item.name}" goes on without this client.{never}',
            f"mlbench wait {item.name}, mlbench status {item.name}, or mlbench cancel {item.name}",
        )
    console.note(f"Cancelling {item.name} ...")
    finished = supervise.cancel(item, engine, store, seconds=STOP_SECONDS)
    if finished is None:
        return explain_stop(
            stopped,
            f'The run "{item.name}" is being cancelled; its archive follows.{never}',
            f"mlbench status {item.name}",
        )
    if finished.outcome is not Outcome.CANCELLED:
        return explain_stop(
            stopped, f"{finished.summary} Its archive is complete.{never}", f"mlbench status {item.name}"
        )
    return explain_stop(
        stopped,
        f'The run "{item.name}" was cancelled; partial results are in {item.folder}.{never}',
        f"mlbench logs {item.name}, or mlbench delete {item.name}",
    )
