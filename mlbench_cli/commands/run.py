"""`mlbench run`: request -> experiment -> recorded runs -> submitted and followed, one after the other."""

import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec.structs import replace

import templates
from mlbench_cli import console
from mlbench_cli.api import AuthorsProgram, Client, Launch, OpenExperiment, RunHandle, Submission
from mlbench_cli.commands._common import (
    Format,
    complete_experiments,
    output_option,
    require_goal_option,
    yes_option,
)
from mlbench_cli.commands._experiment_file import run_file
from mlbench_cli.commands._members import How, follow_all, start_detached
from mlbench_cli.commands._report import Ended, report_ended
from mlbench_cli.commands._request_options import add_request_options
from mlbench_cli.commands._values import HELP_ALL, PanelCommand
from mlbench_cli.errors import UsageError, naming_file_on_os_error
from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.model.run import Cluster
from mlbench_cli.model.spec import MAX_WORKERS, NAME_LENGTH, RunSpec
from mlbench_cli.runs import wizard
from mlbench_cli.runs.defaults import with_defaults
from mlbench_cli.runs.experiment_file import describes_several
from mlbench_cli.runs.launch import brings_files, check_names, is_public, local_machine
from mlbench_cli.runs.matrix import MAX_CONFIRMED, MAX_MEMBERS
from mlbench_cli.runs.own_command import ends_early, hides_failures, relative_scripts, trains_separately
from mlbench_cli.runs.preflight import find_too_many_workers
from mlbench_cli.runs.repeats import Repeats, repeats_in
from mlbench_cli.runs.request import (
    ADVANCED,
    OPTIONS,
    Request,
    equivalent_command,
    flag,
    format_file,
    given_value,
    merge,
    read_file,
    take_rare,
)
from mlbench_cli.storage.store import Store
from mlbench_cli.tasks.catalog import packages_of, use_task_folder
from mlbench_cli.util.files import write_atomically
from mlbench_cli.util.text import list_some, shorten

SOON_SECONDS = 1800.0  # before a cluster's end

# What makes clusters and looks for images is imported where it is needed: it would make the start of each run 25 ms
# longer.

CREATED = "created_"  # prefix of the names of the options that a cluster to be created takes
_OF_RUNS = ("to", "only_report")
_BESIDE_RUNS = (
    *("file", "detach", "dry_run", "retry_failed", "quiet", "yes", "output", "cluster"),
    *_OF_RUNS,
)


class RunCommand(PanelCommand):
    """`mlbench run`. With --create PROVIDER it also has the options of `create-cluster PROVIDER`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Add the provider's options, then parse."""
        words = args[: args.index("--")] if "--" in args else args
        named = [word.partition("=")[2] for word in words if word.startswith("--create=")]
        named += [after for word, after in pairwise(words) if word == "--create"]
        if named:
            from mlbench_cli.clusters.creation import find_creator
            from mlbench_cli.commands.create_cluster import cluster_options

            taken = {flag for item in self.params for flag in (*item.opts, *item.secondary_opts)}
            self.params += cluster_options(find_creator(named[-1]), taken, CREATED)
        return super().parse_args(ctx, args)


def _show_all_help(context: typer.Context, given: bool) -> None:
    if given and not context.resilient_parsing:
        context.meta[HELP_ALL] = True
        console.out(context.get_help(), raw=True)
        raise typer.Exit


def run(
    context: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="name of the experiment; the run with N workers is named NAME-N",
            autocompletion=complete_experiments,
        ),
    ] = None,
    workers: Annotated[list[str] | None, typer.Argument(metavar="[N]...", help="number of workers, e.g. 1 2 4")] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            help="YAML file with these options, which flags override, or with a list of runs; "
            "also the name of one that is shipped",
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="ARCHIVE", help="repeat the run of an archive", rich_help_panel=ADVANCED),
    ] = None,
    signers: Annotated[
        Path | None,
        typer.Option("--signers", help="with --from: file of allowed signers, as git's", rich_help_panel=ADVANCED),
    ] = None,
    run_foreign_command: Annotated[
        bool,
        typer.Option(
            "--run-foreign-command",
            help="with --from: run the author's command without asking, whoever signed it",
            rich_help_panel=ADVANCED,
        ),
    ] = False,
    save: Annotated[
        Path | None,
        typer.Option("--save", metavar="FILE", help="write these options to a YAML file", rich_help_panel=ADVANCED),
    ] = None,
    retry_failed: Annotated[
        bool,
        typer.Option("--retry-failed", help="rerun the failed runs of an experiment", rich_help_panel=ADVANCED),
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="return at once; the runs continue in the background")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print what would be submitted, then exit", rich_help_panel=ADVANCED)
    ] = False,
    require_goal: Annotated[bool, require_goal_option(ADVANCED)] = False,
    logs: Annotated[
        bool, typer.Option("--logs", help="print the log of rank 0 while it runs", rich_help_panel=ADVANCED)
    ] = False,
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet",
            "-q",
            help="print only errors, and the folder of each run's archive at the end",
            rich_help_panel=ADVANCED,
        ),
    ] = False,
    yes: Annotated[bool, yes_option(ADVANCED)] = False,
    output: Annotated[Format, output_option(ADVANCED)] = Format.text,
    to: Annotated[
        Path | None,
        typer.Option(
            "--to",
            metavar="FOLDER",
            help="with a file of runs: output folder for table and figures; default: tables/NAME in the data folder",
            rich_help_panel=ADVANCED,
        ),
    ] = None,
    only_report: Annotated[
        bool,
        typer.Option(
            "--only-report",
            help="with a file of runs: start nothing; write table and figures of the finished runs",
            rich_help_panel=ADVANCED,
        ),
    ] = False,
    help_all: Annotated[
        bool,
        typer.Option("--help-all", is_eager=True, callback=_show_all_help, help="Show all options and exit."),
    ] = False,
    keep_cluster: Annotated[
        bool,
        typer.Option(
            "--keep-cluster", help="with --create: leave the cluster until it expires", rich_help_panel=ADVANCED
        ),
    ] = False,
    **options: Any,
) -> int:
    """Run a task, your own command, or a file of many runs, with one or more worker counts.

    On a terminal, mlbench asks for missing options such as the task. Runs start one after the other. The exit code is
    0 if all succeed, else the highest exit code of any run.

    Repeat the command, or give only NAME, to resume an experiment: mlbench keeps finished runs, restarts interrupted
    ones, and adds runs for a higher --repeat or new matrix values.
    """
    if quiet:
        console.be_quiet()
    client = Client(notice=console.note)
    how = How(dry_run, detach, retry_failed, logs, output, ("mlbench", *context.obj))
    if (several := _find_several(client, name, workers, file)) is not None:
        return _run_several(context, several, how)
    if wrong := [name for name in _given(context) if name in _OF_RUNS]:
        raise UsageError(f"{', '.join(map(flag, wrong))}: only for a file with runs.", hint="mlbench run -f FILE")
    options = _describe_cluster(context, options, keep_cluster)
    request = _request(name, workers, file, options)
    if request.create and (source is not None or request.cluster is not None):
        raise UsageError(f"--create and {'--from' if source else '--cluster'} exclude each other.")
    if source is None and (signers is not None or run_foreign_command):
        word = "--run-foreign-command" if run_foreign_command else "--signers"
        raise UsageError(f"{word} works only with --from.", hint=f"mlbench run --from ARCHIVE {word} ...")
    if source is not None:
        agree = partial(_agree, yes=yes, is_trusted=run_foreign_command, is_dry=dry_run)
        launch = client.prepare_repetition(source, request, require_goal=require_goal, signers=signers, agree=agree)
    else:
        if request.task_path is not None:
            use_task_folder(request.task_path)
        request = _complete(client.recall(request), client, ask=not yes, is_dry=dry_run)
        most = MAX_CONFIRMED if yes else MAX_MEMBERS
        prepare = partial(client.prepare, request, require_goal=require_goal, most=most)
        if request.create:
            if save is not None:
                _save(request, save, source)
            return _run_on_new_cluster(client.store, request, prepare, how, yes=yes)
        launch = prepare()
    launch.render(offline=dry_run)
    if save is not None:
        _save(launch.request, save, source)
    return _start(launch, how, repeats=source is None)[0]


def _start(launch: Launch, how: How, *, repeats: bool = True) -> tuple[int, list[RunHandle]]:
    """Start the runs and follow them, unless they are detached or only to be shown; the exit code, and all runs."""
    if how.dry_run:
        _print_submissions(launch.render(offline=True), how.output)
        return 0, []
    _warn(launch.specs)
    for name in dict.fromkeys(spec.cluster for spec in launch.specs if spec.engine == "kubernetes"):
        _warn_of_end(launch.new_cluster or launch.workspace.store.cluster(name))
    if launch.new_cluster is None:
        _require_images(launch.specs, launch.workspace.store.cluster)
    return _follow_all(launch, how, repeats=repeats)


def _warn_of_end(cluster: Cluster) -> None:
    """Warn of a cluster whose cloud has removed the workers, or will during most runs."""
    if (expires := ClusterDetails.of(cluster).expires) is None or (left := expires - time.time()) > SOON_SECONDS:
        return
    end = f"expires in {console.duration(left)}" if left > 0 else f"expired {console.duration(-left)} ago"
    console.warn(f"The cluster {cluster.name} {end}; its create-cluster command with --ttl 8h moves the end.")


def _require_images(specs: Sequence[RunSpec], find_cluster: Callable[[str], Cluster]) -> None:
    if any(spec.engine == "kubernetes" for spec in specs):
        from mlbench_cli.commands._images import require_images

        require_images(specs, find_cluster)


def _follow_all(launch: Launch, how: How, *, repeats: bool = True) -> tuple[int, list[RunHandle]]:
    with launch.open(how.command_line, retry_failed=how.retry_failed) as opened:
        _explain_plan(opened, launch.is_known)
        opened.record()
        if how.detach:
            code = start_detached(opened, how.output)
        else:
            ended = follow_all(opened, logs=how.logs)
    if not how.detach:
        code = _report(opened, ended, how.output)
    if repeats:
        store = launch.workspace.store
        again = replace(launch.request, name=_other_name(store, launch.request.name or opened.name))
        console.note(f"Repeat: {equivalent_command(again)}")
    return code, opened.runs


def _other_name(store: Store, name: str) -> str:
    """A name that no experiment has; with the same name, the command would only resume the experiment."""
    base = re.sub(r"-again\d*$", "", name)[: NAME_LENGTH - 20].rstrip("-")
    names = (f"{base}-again{number if number > 1 else ''}" for number in count(1))
    return next(other for other in names if store.find_experiment(other) is None)


def _given(context: typer.Context) -> list[str]:
    """The parameters that were given on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


def _find_several(client: Client, name: str | None, workers: Sequence[str] | None, file: Path | None) -> str | None:
    """The file with `runs` or, without one, the experiment of such a file that is named alone; None for others."""
    if file is not None:
        return str(file) if describes_several(str(file)) else None
    experiment = None if name is None or workers else client.store.find_experiment(name)
    return name if experiment is not None and "runs" in experiment.request else None


def _run_several(context: typer.Context, file: str, how: How) -> int:
    """Run everything in a file with `runs`. Raises UsageError for options that it gives for each of its runs."""
    words = {"name": "NAME", "workers": "N"}
    allowed = ("name", *_BESIDE_RUNS) if context.params["file"] is None else _BESIDE_RUNS
    if wrong := [words.get(name) or flag(name) for name in _given(context) if name not in allowed]:
        raise UsageError(
            f"{file} describes several runs, so {', '.join(wrong)} cannot be given here.",
            hint="Write it into the file, above runs for all of them.",
        )
    given = context.params
    to = None if given["to"] is None else Path(given["to"])  # the context has texts
    clusters = [given["cluster"]] if given["cluster"] else []
    return run_file(file, clusters, how, yes=given["yes"], only_report=given["only_report"], to=to)


def _agree(program: AuthorsProgram, *, yes: bool, is_trusted: bool, is_dry: bool) -> None:
    """Print what the archive's author chose, and ask. --yes answers for archives of allowed signers only."""
    console.note(str(program))
    if is_trusted or is_dry:
        return
    is_signed = program.signer is not None
    console.confirm("Run this?", yes=yes and is_signed, flag="--yes" if is_signed else "--run-foreign-command")


# --- on a new cluster -----------------------------------------------------------------------------------------------


def _describe_cluster(context: typer.Context, options: dict[str, Any], keep_cluster: bool) -> dict[str, Any]:
    """The options with those of the cluster, as far as they were given, in `create`."""
    given = {name: value for name, value in options.items() if not name.startswith(CREATED)}
    if given.get("create") is None:
        if keep_cluster:
            raise UsageError("--keep-cluster works only with --create.")
        return given
    words = [name for name in _given(context) if name.startswith(CREATED)]
    create = {name.removeprefix(CREATED): options[name] for name in words}
    create = {("custom_value" if name == "custom_values" else name): value for name, value in create.items()}
    if "auto" in (given.get("registry"), create.get("registry")):
        raise UsageError(
            "--registry auto makes an empty registry with the cluster, which has no images for these runs.",
            hint="Leave it out, or create the cluster first: mlbench create-cluster",
        )
    if given.get("num_cpus"):
        create.setdefault("num_cpus", given["num_cpus"])
    kept = {"keep_cluster": True} if keep_cluster else {}
    return {**given, "create": {"provider": given["create"], **create, **kept}}


def _run_on_new_cluster(store: Store, request: Request, prepare: Callable[..., Launch], how: How, *, yes: bool) -> int:
    """Create the cluster, run, verify what was brought home, and delete the cluster; the exit code of the runs."""
    from mlbench_cli.clusters.creation import read_creation
    from mlbench_cli.commands import _new_cluster as clusters

    keep = bool(request.create.get("keep_cluster"))
    if how.detach and not keep:
        raise UsageError(
            "--detach with --create would leave nobody to delete the cluster.",
            hint="Leave out --detach, or add --keep-cluster: the cluster then stays until it expires.",
        )
    check_names(request)
    wanted = read_creation(request.create, max(request.workers), str(request.name))
    sketch = prepare(new_cluster=wanted.describe())
    sketch.render(offline=True)
    specs = sketch.specs
    wanted = replace(wanted, nodes=max(wanted.nodes, clusters.count_nodes(specs)))
    use = clusters.use_of(store, str(request.name), specs, keep)
    earlier = clusters.find_earlier(store, wanted)
    if earlier is not None and not how.dry_run:
        launch = prepare(new_cluster=earlier)
        if not launch.plan(retry_failed=how.retry_failed).left:
            code, _ = _follow_all(launch, how)
            clusters.end_earlier(store, earlier, use)
            return code
    if not how.dry_run:
        _require_images(specs, lambda name: wanted.describe())
    with clusters.make_cluster(store, wanted, use, yes=yes, dry_run=how.dry_run) as cluster:
        code, runs = _start(prepare(new_cluster=cluster), how)
        if runs and not how.detach:
            clusters.verify_all(runs)
    return code


# --- completing the request -----------------------------------------------------------------------------------------


def _complete(request: Request, client: Client, *, ask: bool, is_dry: bool) -> Request:
    """The request with answers to what it leaves open. Raises UsageError naming what is missing."""
    missing = _missing(request)
    taken = [item.name for item in client.iterate_runs()] if missing and not is_dry else []
    if request.name is not None:
        check_names(request if request.workers else replace(request, workers=(1,)), taken)
    if not missing:
        return request
    if not (ask and console.interactive()):
        reason = ", and there is no terminal to prompt on" if ask else ""
        raise UsageError(
            f"No {', no '.join(missing)} given{reason}.",
            hint=f"mlbench run {request.name or 'NAME'} 1 2 4 --task TASK [--backend NAME], "
            "or --command 'python train.py' [--image NAME:TAG]",
        )

    chosen = client.cluster(request.cluster)
    request, _ = wizard.complete(request, client.clusters(), chosen, taken, with_defaults)
    if not request.create:
        request, _ = client.complete(request)
    console.note(f"\nThe same without prompts: {equivalent_command(request)}\n")
    return request


def _missing(request: Request) -> list[str]:
    """The required options that a request lacks."""
    missing = []
    if request.name is None:
        missing.append("name")
    if not request.workers:
        missing.append("number of workers")
    in_matrix = {*request.matrix, *(key for entry in request.include for key in entry)}
    if request.task is None and request.command is None and not in_matrix & {"task", "command"}:
        missing.append("task or command")
    return missing


def _explain_plan(opened: OpenExperiment, is_known: bool) -> None:
    if not is_known:
        return
    left = {run.id for run in opened.plan.left}
    done = [finished for run in opened.runs if run.run.id not in left and (finished := run.finished) is not None]
    failed = [finished.run.name for finished in done if not finished.outcome.is_success]
    console.note(
        f'Resuming the experiment "{opened.name}": {len(done)} of {len(opened.plan.runs)} runs have ended, '
        f"{len(left)} remaining."
    )
    if failed:
        console.note(f"Failed earlier (rerun with --retry-failed): {', '.join(failed)}.")


def _report(opened: OpenExperiment, ended: Sequence[Ended], output: Format) -> int:
    repeats: list[Repeats] = []
    if len({run.spec.seed for run in opened.plan.runs}) > 1:
        ids = {run.id for run in opened.plan.runs}
        rows = [run.row for run in opened.handle.runs() if run.run.id in ids]
        repeats = repeats_in(opened.workspace.store, rows)
    report_ended(ended, output, repeats, names=[opened.name])
    return max((item.exit_code for item in ended), default=0)


def _save(request: Request, path: Path, source: str | None) -> None:
    """Write the spec file. Raises UsageError if another file is there already, MlbenchError if it cannot be written."""
    if source is not None:
        raise UsageError("--save and --from exclude each other.", hint="Remove one of them.")
    data = format_file(request).encode()
    with naming_file_on_os_error(path, "written"):
        if path.exists() and path.read_bytes() != data:
            raise UsageError(f"{path} already exists.", hint="Choose another file, or delete it.")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data)
    console.note(f"Repeat under another name: mlbench run NAME -f {path}")


# --- the options are Request's fields -------------------------------------------------------------------------------


add_request_options(run, (item for item in OPTIONS if not item.rare))
run.command_class = RunCommand  # type: ignore[attr-defined]


def _request(name: str | None, workers: list[str] | None, file: Path | None, options: dict[str, Any]) -> Request:
    values = {key: value for key, value in options.items() if value not in (None, [])}
    files = [entry for entry in values.get("include", ()) if "=" not in entry or Path(entry).exists()]
    if files:
        values["include"] = [entry for entry in values["include"] if entry not in files]
        values["include_files"] = [*values.get("include_files", ()), *files]
    for item in OPTIONS:
        if item.name in values:
            values[item.name] = given_value(item.name, values[item.name])
    words = list(workers or ())
    if name is not None and name.isascii() and name.isdecimal():  # no name begins with a digit
        if file is None:
            raise UsageError(
                f"{name} is not a valid run name; NAME comes before the numbers of workers.",
                hint="mlbench run NAME 1 2",
            )
        words = [name, *words]
        name = None
    sizes = tuple(_read_size(word, options.get("command")) for word in words)
    given = take_rare(Request(name=name, workers=sizes, **values))
    return given if file is None else merge(read_file(file), given)


def _read_size(word: str, command: str | None) -> int:
    if word.isascii() and word.isdecimal():
        if len(word.lstrip("0")) > len(str(MAX_WORKERS)):  # also more digits than int() takes
            raise UsageError(f"{shorten(word)} workers: the number must be from 1 to {MAX_WORKERS}.")
        return int(word)
    if word[:1].isdigit():  # 1,2,4 or 2.0
        raise UsageError(f'"{word}" is not a number of workers. Several are written with spaces: 1 2 4.')
    if command is None:
        hint = "mlbench run NAME 1 2 --task TASK, or --command 'python train.py' for your own program"
    else:
        hint = f"Quote the command: --command {shlex.quote(f'{command} {word}')}"
    raise UsageError(f'"{word}" is not a number of workers.', hint=hint)


# --- submissions of --dry-run, warnings ----------------------------------------------------------------------------


def _print_submissions(submissions: list[Submission], output: Format) -> None:
    if output == Format.json:
        documents = [{"run": item.spec.name, "documents": list(item.documents)} for item in submissions]
        console.out_json({"submissions": documents})
        return
    scripts = [str(document["script"]) for item in submissions for document in item.documents if "script" in document]
    if scripts:  # as sbatch reads them: mlbench run ... --dry-run | sbatch --test-only
        console.out("\n".join(scripts).rstrip(), raw=True)
        return

    shown: list[dict[str, Any]] = [dict(document) for item in submissions for document in item.documents]
    if console.is_terminal(sys.stdout):  # a pipe to kubectl gets all of it
        for document in shown:
            if code := document.get("binaryData"):
                document["binaryData"] = {name: f"<{len(text)} characters>" for name, text in code.items()}
    console.out(templates.dump(shown).rstrip(), raw=True)


def _warn(specs: Sequence[RunSpec]) -> None:
    for rule, found in find_too_many_workers(specs).items():
        console.warn(f"{', '.join(found)}: more than {rule.sensible} ranks; {rule.reason}.")
    in_public = {spec.task for spec in specs if spec.engine == "kubernetes" and spec.image and is_public(spec.image)}
    if packages := sorted({package for task in in_public for package in packages_of(task)}):
        console.note(f"Workers install {', '.join(packages)} with pip when they start.")
    own = [spec for spec in specs if not spec.runs_task_program]
    commands = {spec.argv for spec in own}
    if any(map(hides_failures, commands)):
        console.warn(
            "The exit code of a pipe is that of tee, so a failed training counts as completed: set -o pipefail"
        )
    if any(map(ends_early, commands)):
        console.warn("The command ends with &, and a run ends with its command: leave out the &, or add wait.")
    separate = set(filter(trains_separately, commands))
    if alone := [spec.name for spec in own if spec.world_size > 1 and spec.argv in separate]:
        console.warn(
            f"{list_some(alone, 3)}: torchrun without --nnodes trains on each worker separately; see "
            "docs/tutorial/own-training.md"
        )
    in_images = {spec.argv for spec in own if spec.engine == "kubernetes" and not brings_files(spec)}
    if scripts := sorted({word for argv in in_images for word in relative_scripts(argv)}):
        console.note(f"Workers use the image's {list_some(scripts, 3)}; --include {scripts[0]} sends this folder's.")
    elsewhere = {spec.argv for spec in own if spec.engine in ("slurm", "hosts")}
    if scripts := sorted({word for argv in elsewhere for word in relative_scripts(argv)}):
        console.warn(
            f"{list_some(scripts, 3)}: commands run in the folder of the run on their machines; name scripts by their "
            f"paths there, e.g. {os.path.abspath(scripts[0])}"
        )
    local = [spec for spec in specs if spec.engine == "local"]
    if not local:
        return
    machine = local_machine()
    sharing = [spec.name for spec in local if spec.device == "gpu" and spec.world_size > machine.gpus]
    if sharing:
        console.warn(f"{', '.join(sharing)}: ranks share GPUs, so times say little about scaling.")
    cores = machine.cores
    crowded = [spec for spec in local if spec.world_size > cores]
    if crowded:
        names = ", ".join(spec.name for spec in crowded)
        console.warn(f"{names}: more ranks than this machine's {cores} cores, so times say little about scaling.")
