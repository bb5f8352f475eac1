"""`mlbench data`: prepare data folders before a run."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, TypedDict

import typer

from mlbench_cli import console, isolation
from mlbench_cli.api import Client
from mlbench_cli.commands._common import Format, Output, complete_clusters, complete_tasks, make_folder
from mlbench_cli.commands._values import PanelCommand
from mlbench_cli.engines.kubernetes.engine import KubernetesEngine
from mlbench_cli.engines.plan import PREPARE, RUN
from mlbench_cli.errors import TaskFailedError, UsageError, naming_file_on_os_error
from mlbench_cli.model.run import Cluster
from mlbench_cli.model.spec import NAME_LENGTH
from mlbench_cli.results.archive.documents import DataIdentityDocument
from mlbench_cli.runs.connect import connect_engine
from mlbench_cli.runs.defaults import default_cluster
from mlbench_cli.runs.launch import task_image
from mlbench_cli.runs.request import Request, pairs
from mlbench_cli.storage.store import Store
from mlbench_cli.tasks.catalog import Task, load_task
from mlbench_cli.util.text import cut, one_line
from task_images.contract import EXIT_ENVIRONMENT, EXIT_USAGE

_PROGRESS = re.compile(r"(.+): (\d+)%( of .+)")  # task_images.fetch


data = typer.Typer(rich_markup_mode=None, add_completion=False)


class PreparedData(TypedDict):
    """The result of a preparation, for `-o json`: task, folder, and data."""

    task: str
    folder: str
    data_identity: DataIdentityDocument | None


@data.callback()
def about() -> None:
    """Prepare the data sets of tasks before a run."""


@data.command(cls=PanelCommand)
def prepare(
    name: Annotated[
        str, typer.Argument(metavar="TASK", help="task (list: mlbench tasks)", autocompletion=complete_tasks)
    ],
    data_dir: Annotated[
        Path | None,
        typer.Option("--data-dir", metavar="DIR", help="folder of the data sets; default: data folder of mlbench"),
    ] = None,
    import_files: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            metavar="FILE|URL",
            help="copy this file, folder, or https://, s3:// or gs:// address into the data folder first; repeatable",
        ),
    ] = None,
    preset: Annotated[str, typer.Option("--preset", help="preset whose parameters determine the conversion")] = "spec",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="parameter of the task, as for the run; repeatable"),
    ] = None,
    claim: Annotated[
        str | None,
        typer.Option(
            "--claim", metavar="PVC", help="prepare the data in this PersistentVolumeClaim, with a run on the cluster"
        ),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option("--size", metavar="SIZE", help="with --claim: create the claim with this size, e.g. 200Gi"),
    ] = None,
    storage_class: Annotated[
        str | None,
        typer.Option("--storage-class", metavar="CLASS", help="with --size: storage class; default: the cluster's"),
    ] = None,
    access: Annotated[
        str | None,
        typer.Option(
            "--access",
            metavar="[rwx|rwo]",
            help="with --size: mount on many nodes or on one; default: many, if the storage class can",
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", help="with --claim: cluster to run on", autocompletion=complete_clusters),
    ] = None,
    output: Output = Format.text,
) -> None:
    """Download, check and convert the data of a task, so runs start without waiting.

    Official archives are downloaded if their license allows it; others must be in the folder, or named with --import.
    After an interruption, repeat the command to resume. It prints the number of samples, a digest, and whether the data
    are the official ones. With --claim, a run of one worker prepares them in a volume of a cluster; --size creates the
    claim if there is none.
    """
    task = load_task(name)
    _check_claim_options(claim, size, storage_class, access)
    parameters = task.resolve(preset, pairs(set_ or (), "set"))
    urls = [path for path in import_files or [] if "://" in path]
    for url in urls:
        _check_url(url, task)
    paths = [Path(os.path.expanduser(path)) for path in import_files or [] if path not in urls]
    if claim is not None:
        if paths:
            raise UsageError(
                "--import copies files on this machine, but a claim is filled on the cluster.",
                hint="Name an address that the cluster can read: --import s3://BUCKET/FILE",
            )
        store = Store(notice=console.note)
        found = store.cluster(cluster) if cluster else default_cluster(store)
        if size is not None:
            _ensure_claim(found, claim, size, storage_class, access)
        _start_filling(request_filling(task, parameters, claim, found, str(data_dir or "/data"), urls), output)
        return
    if cluster is not None:
        raise UsageError("--cluster requires --claim; without --claim, data are prepared on this machine.")
    if data_dir is not None:
        data_dir = data_dir.absolute()
        make_folder(data_dir)
    for path in paths:
        _import_file(path, data_dir, task)
    result = _run_program(task, data_dir, parameters, urls)
    if output == Format.json:
        console.out_json(result)
        return
    identity = result["data_identity"]
    if identity is None:
        console.out(f"{name}: has no data to prepare: it generates them, or its program reads them")
        return
    console.out(f"{name}: ready in {result['folder']}")
    console.out("\n".join(f"  {count:>12,}  {part}" for part, count in identity["counts"].items()).replace(",", " "))
    console.out(f"  digest: {identity['digest'] or 'none'}")
    words = {True: "official data", False: "not the official data", None: "not known to be the official data"}
    reason = f" ({identity['reason']})" if identity["reason"] else ""
    console.out(f"  {words[identity['official']]}{reason}")


def _check_claim_options(claim: str | None, size: str | None, storage_class: str | None, access: str | None) -> None:
    if size is not None and claim is None:
        raise UsageError("--size requires --claim NAME.")
    for option, value in (("--storage-class", storage_class), ("--access", access)):
        if value is not None and size is None:
            raise UsageError(f"{option} requires --size, which creates the claim.")
    if access not in (None, "rwx", "rwo"):
        raise UsageError(f"--access {one_line(str(access), 60)}: choose rwx (many nodes) or rwo (one node).")


def _ensure_claim(cluster: Cluster, name: str, size: str, storage_class: str | None, access: str | None) -> None:
    """Create the claim unless it exists, and describe it."""
    engine = connect_engine(cluster)
    if not isinstance(engine, KubernetesEngine):
        raise UsageError(f'The cluster "{cluster.name}" has no persistent volume claims.', hint="--cluster NAME")
    found = engine.ensure_claim(name, size, storage_class, access)
    made = "created" if found.is_new else "exists and is used unchanged"
    console.note(f"The claim {found.name} {made}: {found.size}, storage class {found.storage_class}.")
    if not found.is_shared:
        console.warn("Only one node at a time can mount it; for several nodes, use a storage class with --access rwx.")


def _start_filling(request: Request, output: Format) -> None:
    """Start the run that fills a claim, and say how to follow it."""
    with Client(notice=console.note) as client:
        client.submit(request, command_line=("mlbench", "data", "prepare"))
    name = f"{request.name}-1"
    if output == Format.json:
        console.out_json({"run": name, "cluster": request.cluster, "claim": request.data_claim})
        return
    console.out(f"{name}: prepares the data in the claim {request.data_claim} of {request.cluster}")
    console.next_step(f"mlbench logs {name} --follow", f"mlbench wait {name}")


def request_filling(
    task: Task,
    parameters: Mapping[str, object],
    claim: str,
    cluster: Cluster,
    folder: str = "/data",
    urls: Sequence[str] = (),
) -> Request:
    """The run of one worker that prepares the data of `task` in a claim, mounted at `folder`. Raises UsageError."""
    if cluster.engine != "kubernetes":
        raise UsageError(
            f'The cluster "{cluster.name}" has no persistent volume claims.',
            hint=f"--cluster NAME; on this machine: mlbench data prepare {task.name} --data-dir DIR",
        )
    return Request(
        name=f"prepare-{task.name.replace('_', '-')}"[:NAME_LENGTH].rstrip("-"),
        workers=(1,),
        command=shlex.join(["python", "-m", PREPARE, task.name, _module_of(task), *urls]),
        image=task_image(task, cluster),
        cluster=cluster.name,
        data_claim=claim,
        data_dir=folder,
        set=dict(parameters),
    )


def _import_file(path: Path, data_dir: Path | None, task: Task) -> None:
    """Link `path` into the data folder, or copy it to another file system; a file of that name stays as it is."""
    if data_dir is None:
        raise UsageError("--import needs --data-dir, the target folder.")
    _check_name(path.name, task)
    target = data_dir / path.name
    if target.exists():
        console.note(f"{target} exists and is used unchanged.")
        return
    with naming_file_on_os_error(target, "written"):
        if path.is_dir():
            shutil.copytree(path, target)
            return
        partial = target.with_name(f".{target.name}.import")
        partial.unlink(missing_ok=True)
        try:
            os.link(path, partial)
        except OSError:  # another file system, or one without links
            shutil.copyfile(path, partial)
        partial.rename(target)


def _check_url(url: str, task: Task) -> None:
    scheme, _, rest = url.partition("://")
    if scheme not in ("http", "https", "s3", "gs") or "/" not in rest:
        raise UsageError(
            f"--import {one_line(url, 200)}: this is not the address of a file.",
            hint="https://HOST/FILE, s3://BUCKET/FILE or gs://BUCKET/FILE",
        )
    _check_name(url.rpartition("/")[2], task)


def _check_name(name: str, task: Task) -> None:
    """Raise UsageError for a file that the task does not read."""
    known = [*(each for names in task.files.wanted for each in names), *task.files.imports] if task.files else []
    if not any(fnmatchcase(name, each) for each in known):
        raise UsageError(
            f'The task "{task.name}" does not read a file called "{one_line(name, 100)}".',
            hint=f"It reads: {', '.join(known)}." if known else "It reads no files.",
        )


def _module_of(task: Task) -> str:
    """The package of the task: what its command runs as a module, or has `task_images.run` run."""
    if task.origin is None:
        return f"task_images.{task.name}"
    words = [word for word in (*task.command, task.name) if word != RUN]
    return words[words.index("-m") + 1] if "-m" in words else task.name


def _run_program(task: Task, data_dir: Path | None, parameters: Mapping[str, Any], urls: Sequence[str]) -> PreparedData:
    """Run the task's preparation, whose progress goes to standard error; returns its result."""
    command = isolation.rank_command(
        ["python", "-m", PREPARE, task.name, _module_of(task), *urls],
        os.environ,
        task.search_path,
    )
    command[0] = sys.executable
    environment = isolation.rank_environment(os.environ)
    environment |= {
        "MLBENCH_PARAMETERS": json.dumps(dict(parameters)),
        "MLBENCH_DATA_DIR": str(data_dir) if data_dir else "",
    }
    line = console.ProgressLine()
    if line.is_live:
        environment["MLBENCH_PROGRESS_SECONDS"] = "1"
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as done:
        assert done.stdout is not None
        assert done.stderr is not None
        try:
            for text in done.stderr:
                _show(line, text.rstrip("\n"))
        finally:
            line.close()
        printed = done.stdout.read()
    if done.returncode in (EXIT_USAGE, EXIT_ENVIRONMENT):
        raise UsageError(f'The data of "{task.name}" could not be prepared; the lines above say why.')
    if done.returncode:
        raise TaskFailedError(
            f'The preparation of "{task.name}" failed with exit code {done.returncode}.',
            hint="Repeat the command to resume.",
        )
    result: PreparedData = json.loads(printed.splitlines()[-1])
    return result


def _show(line: console.ProgressLine, text: str) -> None:
    """Show a line of the preparation: progress as a bar that is redrawn, anything else as it is."""
    progress = _PROGRESS.fullmatch(text)
    if progress is None or not line.is_live:
        line.print_above(text)
        return
    what, share, rest = progress.groups()
    line.update(lambda columns: cut(f"{what}: {console.draw_bar(int(share) / 100)} {share}%{rest}", columns or 200))
