"""`mlbench run`: request -> experiment -> recorded runs -> submitted and followed, one after the other."""

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import Field, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from mlbench_cli import console
from mlbench_cli.catalog import use_task_folder
from mlbench_cli.commands._common import (
    Format,
    Output,
    RequireGoal,
    Yes,
    complete_backends,
    complete_clusters,
    complete_presets,
    complete_tasks,
    engine_of,
    renderer_of,
)
from mlbench_cli.commands._members import follow_all, start_detached, wait_for_queue
from mlbench_cli.commands._report import Ended, report_ended
from mlbench_cli.engines.base import Submission
from mlbench_cli.errors import UsageError
from mlbench_cli.files import write_atomically
from mlbench_cli.model import Cluster, Experiment
from mlbench_cli.runs import launch, queue
from mlbench_cli.runs.defaults import default_cluster, with_defaults
from mlbench_cli.runs.experiment import Plan, absolute_paths, expand, request_of
from mlbench_cli.runs.finished import read_finished
from mlbench_cli.runs.matrix import MAX_CONFIRMED, MAX_MEMBERS
from mlbench_cli.runs.preflight import find_too_many_workers
from mlbench_cli.runs.recording import record
from mlbench_cli.runs.repeats import repeats_in
from mlbench_cli.runs.request import (
    OPTIONS,
    REPEATABLE,
    Request,
    equivalent_command,
    flag,
    format_file,
    given_value,
    matrix_of,
    merge,
    read_file,
    request_document,
)
from mlbench_cli.runs.select import members
from mlbench_cli.runs.start import document_writer, plan_experiment
from mlbench_cli.runs.views import EngineCache
from mlbench_cli.spec import RunSpec
from mlbench_cli.store import Store
from mlbench_cli.times import now


def run(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="the experiment; its run with N workers is named NAME-N")
    ] = None,
    workers: Annotated[list[int] | None, typer.Argument(metavar="[N]...", help="numbers of workers, as 1 2 4")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="YAML with these options; flags go first")] = None,
    source: Annotated[
        str | None, typer.Option("--from", metavar="ARCHIVE", help="repeat the run of an archive exactly")
    ] = None,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="FILE", help="also write the YAML file that asks for the same")
    ] = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="start the failed runs of an existing experiment once more")
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="start and return at once; a process starts several in turn")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print what would be submitted, and stop")] = False,
    require_goal: RequireGoal = False,
    logs: Annotated[bool, typer.Option("--logs", help="show the log lines of rank 0 while it runs")] = False,
    yes: Yes = False,
    output: Output = Format.text,
    **options: Any,
) -> int:
    """Run a task, or a command of your own, with one or several numbers of workers.

    Asks on a terminal for what is left open: which task, which backend. Several runs start one after the other. The
    exit code is 0 if all went well, else the highest one.

    The same command line again goes on with an experiment: finished runs are kept, interrupted ones are started once
    more, a higher --repeat and further values of a matrix are added. NAME alone does so, too.
    """
    store = Store()
    request = _request(name, workers, file, options)
    if source is not None:
        from mlbench_cli.commands._again import repeat_of

        request, cluster, candidates, document = repeat_of(source, request, store)
    else:
        use_task_folder(request.task_path)
        request, cluster = _complete(_recall(request, store), store, ask=not yes, is_dry=dry_run)
        most = MAX_CONFIRMED if yes else MAX_MEMBERS
        candidates = expand(request, cluster, find_cluster=store.cluster, with_defaults=with_defaults, most=most)
        document = request_document(absolute_paths(request))
    engines = EngineCache(store, console.note, connect=renderer_of if dry_run else engine_of)
    submissions = [engines.of_cluster(candidate.spec.cluster).render(candidate.spec) for candidate in candidates]
    if save is not None:
        _save(request, save, source)
    if dry_run:
        _print_submissions(submissions, output)
        return 0
    specs = [candidate.spec for candidate in candidates]
    _warn(specs)
    if any(spec.engine == "kubernetes" for spec in specs):
        from mlbench_cli.commands._images import require_images

        require_images(specs, store.cluster)
    known = store.find_experiment(str(request.name))
    experiment = Experiment(
        id=known.id if known else os.urandom(6).hex(),
        name=str(request.name),
        created=known.created if known else now(),
        request=document,
        members=known.members if known else (),
        require_goal=require_goal or bool(known and known.require_goal),
        parallel=request.parallel or (known.parallel if known else 1),
    )
    with queue.hold(experiment, store) as held:
        plan = plan_experiment(experiment, candidates, store, retry_failed=retry_failed)
        _explain_plan(plan, bool(known))
        record(plan.experiment, plan.new, store, document_writer(("mlbench", *context.obj)))
        if detach:
            code = start_detached(plan, engines, store, held, output)
        else:
            ended = _follow(plan, engines, store, held, logs)
    if not detach:
        code = _report(plan, ended, store, output)
    if source is None:
        console.note(f"The same again: {equivalent_command(request)}")
    return code


# --- the way of an experiment ---------------------------------------------------------------------------------------


def _complete(request: Request, store: Store, *, ask: bool, is_dry: bool) -> tuple[Request, Cluster]:
    """The request with defaults and answers, and its cluster. Raises UsageError naming what is missing."""
    cluster = store.cluster(request.cluster) if request.cluster else default_cluster(store)
    taken = () if is_dry else [row.run.name for row in store.runs()]
    missing = _missing(request)
    if request.name is not None:
        launch.check_names(request if request.workers else replace(request, workers=(1,)), taken if missing else ())
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
    elif not _names_clusters(request):
        request = with_defaults(request, cluster)
    if cluster.provider != "local" and request.cluster is None and not _names_clusters(request):
        request = replace(request, cluster=cluster.name)
    if missing:
        console.note(f"\nThe same without questions: {equivalent_command(request)}\n")
    return request, cluster


def _names_clusters(request: Request) -> bool:
    """Whether the matrix says on which clusters the runs are."""
    return bool(matrix_of(request).keys() & {"cluster"})


def _missing(request: Request) -> list[str]:
    """What a run cannot do without."""
    missing = []
    if request.name is None:
        missing.append("name")
    if not request.workers:
        missing.append("number of workers")
    in_matrix = {*request.matrix, *(key for entry in request.include for key in entry)}
    if request.task is None and request.command is None and not in_matrix & {"task", "command"}:
        missing.append("task or command")
    return missing


def _recall(request: Request, store: Store) -> Request:
    """A request that says nothing of what to run, but names an experiment: what was asked for then, changed by it."""
    if request.name is None or request.workers or request.task is not None or request.command is not None:
        return request
    experiment = store.find_experiment(request.name)
    return request if experiment is None else merge(request_of(experiment), request)


def _explain_plan(plan: Plan, is_known: bool) -> None:
    if not is_known:
        return
    done = [finished for run in plan.done if (finished := read_finished(run)) is not None]
    failed = [finished.run.name for finished in done if not finished.outcome.is_success]
    console.note(
        f'Going on with the experiment "{plan.experiment.name}": {len(done)} of {len(plan.runs)} runs have ended, '
        f"{len(plan.left)} are left."
    )
    if failed:
        console.note(f"Failed, and kept so without --retry-failed: {', '.join(failed)}.")


def _follow(plan: Plan, engines: EngineCache, store: Store, held: queue.HeldQueue, logs: bool) -> list[Ended]:
    require_goal = plan.experiment.require_goal
    die_with_client = any(engines(run).dies_with_client for run in plan.left)
    if plan.experiment.parallel > 1 and len(plan.left) > 1 and not die_with_client:
        return wait_for_queue(plan, engines, store, held, require_goal=require_goal)
    return follow_all(plan, engines, store, require_goal=require_goal, logs=logs)


def _report(plan: Plan, ended: Sequence[Ended], store: Store, output: Format) -> int:
    ids = {run.id for run in plan.runs}
    has_repeats = len({run.spec.seed for run in plan.runs}) > 1
    rows = [row for row in members(store, plan.experiment) if row.run.id in ids]
    report_ended(ended, output, repeats_in(rows) if has_repeats else [])
    return max((item.exit_code for item in ended), default=0)


def _save(request: Request, path: Path, source: str | None) -> None:
    """Write the spec file. Raises UsageError if another file is there already."""
    if source is not None:
        raise UsageError("--save writes a request, and --from repeats a frozen run.", hint="Leave out one of them.")
    data = format_file(request).encode()
    try:
        if path.exists() and path.read_bytes() != data:
            raise UsageError(f"{path} is there already.", hint="Choose another file, or remove it.")
        write_atomically(path, data)
    except (OSError, ValueError) as error:
        raise UsageError(f"The spec file {path} cannot be written: {error}.") from None
    console.note(f"The same again: mlbench run -f {path}")


# --- the options are Request's fields -------------------------------------------------------------------------------


def _parameter(item: "Field[Any]") -> inspect.Parameter:
    """A field of Request as a parameter that Typer makes an option of."""
    facts = item.metadata
    repeated = facts["kind"] in REPEATABLE
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
        if item.name in values:
            values[item.name] = given_value(item.name, values[item.name])
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
    scripts = [str(document["script"]) for item in submissions for document in item.documents if "script" in document]
    if scripts:  # as sbatch reads them: mlbench run ... --dry-run | sbatch --test-only
        console.out("\n".join(scripts).rstrip())
        return
    import templates

    console.out(templates.dump(document for item in submissions for document in item.documents).rstrip())


def _warn(specs: Sequence[RunSpec]) -> None:
    for rule, found in find_too_many_workers(specs).items():
        console.warn(f"{', '.join(found)}: more than {rule.sensible} ranks; {rule.reason}.")
    local = [spec for spec in specs if spec.engine == "local"]
    if not local:
        return
    machine = launch.local_machine()
    sharing = [spec.name for spec in local if spec.device == "gpu" and spec.world_size > machine.gpus]
    if sharing:
        console.warn(f"{', '.join(sharing)}: ranks share GPUs; their times say little about scaling.")
    cores = machine.cores
    crowded = [spec for spec in local if spec.world_size > cores]
    if crowded:
        names = ", ".join(spec.name for spec in crowded)
        console.warn(f"{names}: more ranks than this machine's {cores} cores; their times say little about scaling.")
