"""The frozen spec of a run, once more: `mlbench run --from ARCHIVE`."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from mlbench_cli import __version__
from mlbench_cli.api.launches import Launch, make_launch
from mlbench_cli.api.runs import RunHandle
from mlbench_cli.api.workspace import Workspace
from mlbench_cli.catalog import find_rules
from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.model import Cluster
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.results.archive.verify import open_verified
from mlbench_cli.runs import launch
from mlbench_cli.runs.experiment import FROM, Candidate
from mlbench_cli.runs.request import Request, flag
from mlbench_cli.runs.select import one_run
from mlbench_cli.spec import CUSTOM, NAME_LENGTH, RunSpec, common_name
from mlbench_cli.store import Store


def repeat_archive(workspace: Workspace, source: str, request: Request, *, require_goal: bool = False) -> Launch:
    """The launch of a repetition. `request` gives at most its name.

    `source` is a folder, a zip, or the name of a run. Raises UsageError or NotFoundError with the reason if the run
    cannot be repeated here exactly.
    """
    store = workspace.store
    for item in fields(Request):
        if item.name != "name" and getattr(request, item.name) not in (None, (), {}):
            word = "a number of workers" if item.name == "workers" else flag(item.name)
            raise UsageError(
                f"--from repeats a run exactly; {word} would change it.",
                hint="mlbench run NAME --from ARCHIVE, with nothing else that says what to run",
            )
    with _open(source, workspace) as archive:
        document = archive.run
    spec = RunSpec.from_dict(document["spec"])
    cluster = _cluster(spec, store)
    _require_same_task(spec, document)
    _require_same_code(spec, document)
    if cluster.provider == "local":
        launch.check_local(spec, launch.local_machine())
        if spec.data_dir is not None and not Path(spec.data_dir).is_dir():
            raise _refusal(f"its data folder {spec.data_dir} does not exist on this machine")
    elif spec.kubernetes.template_dir and not Path(spec.kubernetes.template_dir).is_dir():
        raise _refusal(f"its templates in {spec.kubernetes.template_dir} do not exist on this machine")
    name = request.name or _default_name(spec)
    spec = replace(spec, name=f"{name}-{spec.workers}")
    if spec.task == CUSTOM or spec.preset == "open":
        workspace.notify("Warning: The run has a command of its own: its files are used as they are now.")
    request = Request(name=name, workers=(spec.workers,))
    recorded = {"name": name, FROM: str(document["id"])}
    return make_launch(workspace, request, [Candidate(spec, {})], recorded, require_goal=require_goal)


def _open(source: str, workspace: Workspace) -> Archive:
    path = Path(source)
    if "\0" not in source and path.exists():
        return open_verified(path)
    try:
        row = one_run(workspace.store, source)
    except NotFoundError:
        raise NotFoundError(
            f"There is no archive {source[:200]}, and no run of that name.", hint="mlbench download NAME"
        ) from None
    return open_verified(RunHandle(workspace, row).results)


def _cluster(spec: RunSpec, store: Store) -> Cluster:
    try:
        cluster = store.cluster(spec.cluster)
    except NotFoundError:
        raise _refusal(
            f'it ran on the cluster "{spec.cluster}", which is not known here',
            hint="mlbench attach-cluster, or mlbench create-cluster; then the same again",
        ) from None
    engine = launch.engine_name(cluster)
    if engine != spec.engine:
        raise _refusal(f'it ran on {spec.engine}, and the cluster "{spec.cluster}" is {engine} here')
    return cluster


def _require_same_task(spec: RunSpec, document: Any) -> None:
    """Refuse a task whose rules are not those of then: goal, presets or command of the catalogue have changed."""
    then = document.get("task")
    if then is None:
        return
    rules = find_rules(spec.task, spec.preset)
    if rules is None:
        raise _refusal(f'the task "{spec.task}" is not in this catalogue (mlbench {__version__})')
    if rules.to_dict() != then:
        changed = [key for key, value in rules.to_dict().items() if then.get(key) != value]
        raise _refusal(
            f'the task "{spec.task}" has changed since ({", ".join(changed)})',
            hint=f"Install mlbench {document.get('mlbench')}, which made the archive.",
        )


def _require_same_code(spec: RunSpec, document: Any) -> None:
    """Refuse a local run of a catalogue task whose installed code is not that of then."""
    then = ((document.get("provenance") or {}).get("code") or {}).get("digest")
    if then is None or spec.engine != "local":
        return
    from mlbench_cli.provenance import collect_provenance

    now = collect_provenance(spec).code
    if now is None or now.digest != then:
        raise _refusal(
            f'the code of the task "{spec.task}" has changed since: its digest was {then[:12]}, now '
            f"{now.digest[:12] if now else 'unknown'}",
            hint=f"Install mlbench {document.get('mlbench')}, which made the archive.",
        )


def _refusal(reason: str, hint: str | None = None) -> UsageError:
    return UsageError(f"The run cannot be repeated here exactly: {reason}.", hint=hint or "mlbench run --help")


def _default_name(spec: RunSpec) -> str:
    """ "demo-again" for "demo-2" and "demo-2-r1"."""
    base = (common_name(spec.name) or spec.name).removesuffix(f"-{spec.workers}")
    room = NAME_LENGTH - len(f"-again-{spec.workers}")
    return f"{base[:room].rstrip('-')}-again"
