"""Run the frozen spec of an archive again: `mlbench run --from ARCHIVE`, and `mlbench reproduce`.

An archive may come from a stranger, so nothing in it is executed because the archive says so. A catalog task runs the
installed program only. Everything else that its author chose to execute, mount or pass is an `AuthorsProgram`, which
somebody on this machine must agree to.
"""

import hashlib
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from mlbench_cli import __version__
from mlbench_cli.api.launches import Launch, make_launch
from mlbench_cli.api.runs import RunHandle
from mlbench_cli.errors import MlbenchError, NotFoundError, UsageError
from mlbench_cli.model.methods import method_phrase
from mlbench_cli.model.run import Cluster
from mlbench_cli.model.spec import NAME_LENGTH, RunSpec, common_name
from mlbench_cli.results.analysis.reproduction import in_order
from mlbench_cli.results.archive.bundle import refuse_bundle
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.results.archive.sign import OriginError, Signer, check_origin
from mlbench_cli.results.archive.verify import open_verified
from mlbench_cli.runs import launch
from mlbench_cli.runs.connect import Workspace
from mlbench_cli.runs.experiment import FROM, Candidate
from mlbench_cli.runs.kubernetes_options import resolve_kubernetes
from mlbench_cli.runs.request import Request, flag
from mlbench_cli.runs.select import one_run
from mlbench_cli.storage import run_folder
from mlbench_cli.storage.store import Store
from mlbench_cli.tasks.catalog import find_rules, load_task
from mlbench_cli.tasks.command_code import FOLDER as CODE_FOLDER
from mlbench_cli.tasks.provenance import collect_provenance
from mlbench_cli.util.text import one_line
from task_images.methods import FILES

MAX_CODE_BYTES = 64 << 20  # of all files of a command
# Methods of mlbench itself: packages and files register theirs later.
OWN_METHODS = frozenset(FILES)


class Leaf(Enum):
    """What a field of a spec holds, which decides whether a repetition takes it from an archive."""

    VALUE = "a number, a switch or one of fixed words: taken, and shown if it is not the usual one"
    LABEL = "a name that only labels the run or is checked here: taken"
    CHECKED = "the program of a catalog task: it must be the one installed here"
    PARTS = "a mapping, of which each entry is judged"
    CHOICE = "a path, file, code, host, secret, mount or right: taken only if somebody here agrees"


def _leaves(kind: Leaf, names: str) -> dict[str, Leaf]:
    return dict.fromkeys(names.split(), kind)


# Every field of RunSpec, and of KubernetesOptions below "kubernetes.".
LEAVES: Mapping[str, Leaf] = {
    **_leaves(
        Leaf.VALUE,
        "workers run_on_all processes_per_worker device gpus_per_worker cpus goal seed anonymous share_machine network "
        "pin faults on_failure checkpoint_every detect_seconds absent_seconds timeout",
    ),
    **_leaves(Leaf.LABEL, "name cluster engine task preset backend functional_only cluster_kind price template"),
    **_leaves(Leaf.CHECKED, "argv image task_path"),
    **_leaves(Leaf.PARTS, "parameters method kubernetes"),
    **_leaves(Leaf.CHOICE, "data_dir env include_files nodes kubernetes.runtime_class"),
    **_leaves(
        Leaf.VALUE,
        "kubernetes.memory kubernetes.shm kubernetes.start_timeout kubernetes.keep_seconds kubernetes.collect "
        "kubernetes.spread kubernetes.share_nodes",
    ),
    **_leaves(
        Leaf.CHOICE,
        "kubernetes.namespace kubernetes.node_selector kubernetes.tolerations kubernetes.pull_secret kubernetes.queue "
        "kubernetes.data_claim kubernetes.registry kubernetes.gpu_resource kubernetes.devices kubernetes.pod_patch "
        "kubernetes.provisioning_class kubernetes.fabric kubernetes.network_policy",
    ),
}


class AuthorsProgram(Struct, frozen=True):
    """What a repetition would execute, mount or pass because the author of the archive chose it.

    `choices` are (field, value) pairs, the command first. `signer` is who signed the archive, if it is one of the
    reader's allowed signers. `code` are the files of the command that the archive has, by name.
    """

    source: str
    choices: tuple[tuple[str, str], ...]
    signer: Signer | None = None
    code: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def is_shown_whole(self) -> bool:
        """Whether the command and its files are all that the author chose."""
        return {name for name, _ in self.choices} <= {"command", "include_files"}

    def __str__(self) -> str:
        by = f"signed by {self.signer.principal}" if self.signer else "not signed by an allowed signer"
        lines = [f"{one_line(self.source)} ({one_line(by)}) asks to run what its author chose:"]
        return "\n".join([*lines, *(f"  {name}: {one_line(value, 2000)}" for name, value in self.choices)])


def refuse_program(program: AuthorsProgram) -> None:
    """Reject a program that nobody has agreed to: always raises UsageError."""
    raise UsageError(f"{program}\nIt was not run.", hint="prepare_repetition(..., agree=...) decides about it")


def repeat_archive(
    workspace: Workspace,
    source: str,
    request: Request,
    *,
    require_goal: bool = False,
    signers: Path | None = None,
    agree: Callable[[AuthorsProgram], None] = refuse_program,
) -> Launch:
    """The launch of a repetition. `request` gives at most its name.

    `source` is a folder, a zip, or the name of a run. `agree` is called with what the archive's author chose to execute
    unless this machine started that very run, and raises to refuse. `signers` is a file of allowed signers. Raises
    UsageError or NotFoundError with the reason if the run cannot be repeated here exactly.
    """
    for name, value in msgspec.structs.asdict(request).items():
        if name != "name" and value not in (None, (), {}):
            word = "a number of workers" if name == "workers" else flag(name)
            raise UsageError(
                f"--from repeats a run exactly; {word} would change it.",
                hint="mlbench run NAME --from ARCHIVE, without other options that say what to run",
            )
    with _open(source, workspace) as archive:
        frozen = _read(archive, source, workspace, signers)
    spec = frozen.spec
    _check_and_agree(frozen, _cluster(spec, workspace.store), workspace.store, agree)
    _announce_changes(workspace, spec)
    name = request.name or _default_name(spec, "again")
    spec = replace(spec, name=f"{name}-{spec.workers}")
    if not spec.runs_task_program:
        workspace.notify("Warning: The run uses a custom command: its files are used in their current state.")
    return _make_launch(workspace, name, frozen, [spec], require_goal=require_goal)


class Place(Struct, frozen=True):
    """Where a reproduction runs. `cluster`: None for this machine; `data_dir`: where the data are there."""

    cluster: str | None = None
    data_dir: str | None = None


def reproduce_archives(
    workspace: Workspace,
    original: Sequence[Archive],
    name: str | None,
    repeats: int,
    place: Place,
    agree: Callable[[AuthorsProgram], None] | None = None,
) -> Launch:
    """The launch of `repeats` further runs of what `original`, verified repeats of one run, ran.

    Seeds are those of the original, then the next ones. `agree` is called with what the author chose, unless this
    machine started that very run, and raises to refuse, as it does by default; else a command runs with the files that
    the archive has of it. Raises UsageError or NotFoundError with the reason if the run cannot be repeated.
    """
    archive = in_order(original)[0]
    frozen = _read(archive, str(archive.path), workspace, None)
    spec, store = frozen.spec, workspace.store
    if place.cluster is None and spec.engine != "local":
        raise UsageError(
            f'The original ran on the cluster "{one_line(spec.cluster)}" ({spec.engine}).',
            hint="Choose where to repeat it: --cluster NAME (mlbench list-clusters)",
        )
    cluster = store.cluster(place.cluster or "local")
    if cluster.engine != spec.engine or cluster.name != spec.cluster:
        if not spec.runs_task_program:
            raise UsageError(
                "The original ran a command of its author, which is not started on another cluster.",
                hint="Run it yourself, then: mlbench reproduce ARCHIVE --with RUN",
            )
        spec = launch.move(spec, cluster, place.data_dir)
    elif place.data_dir is not None:
        spec = replace(spec, data_dir=place.data_dir)
    frozen = replace(frozen, spec=spec)
    folder = None
    if _check_and_agree(frozen, cluster, store, agree or refuse_to_reproduce, data_dir=place.data_dir) and frozen.code:
        spec, folder = _use_code(spec, frozen.code, store.folder)
        frozen = replace(frozen, spec=spec)
    _announce_changes(workspace, spec)
    name = name or _default_name(spec, "repro", len(f"-r{repeats}"))
    seeds = sorted({int(each.run["spec"]["seed"]) for each in original})[:repeats]
    further = (seed for seed in range(max(seeds) + 1, 2**32) if seed not in seeds)
    seeds += [next(further) for _ in range(repeats - len(seeds))]
    specs = [replace(spec, name=f"{name}-{spec.workers}-r{number}", seed=seed) for number, seed in enumerate(seeds, 1)]
    return replace(_make_launch(workspace, name, frozen, specs), folder=folder)


def _use_code(spec: RunSpec, code: Mapping[str, bytes], home: Path) -> tuple[RunSpec, Path]:
    """The spec with the files of the archive, and the folder below `home` that has them; a path of the author's
    machine in the command stands for the file of that name."""
    digest = hashlib.sha256(b"".join(name.encode() + b"\0" + data for name, data in sorted(code.items()))).hexdigest()
    folder = home / "fetched" / f"{digest[:16]}-code"
    for name, data in code.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(0o700 if data.startswith(b"#!") else 0o600)
    # With "./", so that a script that is the program itself is not looked for on the PATH.
    words = (f"./{name}" if word.startswith("/") and (name := Path(word).name) in code else word for word in spec.argv)
    return replace(spec, argv=tuple(words), include_files=tuple(sorted(code))), folder


def refuse_to_reproduce(program: AuthorsProgram) -> None:
    """Refuse what the author of an original chose."""
    hint = "Look at it, run it yourself (mlbench run NAME --from ARCHIVE), then: mlbench reproduce ARCHIVE --with NAME"
    if program.is_shown_whole:
        hint = "Look at it; if you trust it: mlbench reproduce ARCHIVE --run-foreign-command"
    if {name for name, _ in program.choices} == {"data_dir"}:
        hint = "Name the folder of this data on this machine: --data-dir FOLDER"
    raise UsageError(
        f"{program}\nmlbench reproduce does not run commands chosen by the author of an archive.", hint=hint
    )


class _FrozenRun(Struct, frozen=True):
    """The run that an archive describes. `document` is run.json as it is: its command may have several lines."""

    source: str
    spec: RunSpec
    document: Any
    signer: Signer | None
    code: Mapping[str, bytes]


def _read(archive: Archive, source: str, workspace: Workspace, signers: Path | None) -> _FrozenRun:
    document = archive.document(run_folder.RUN)
    signer = None if signers is None else _find_signer(archive, signers, workspace)
    return _FrozenRun(source, RunSpec.from_dict(document["spec"]), document, signer, _read_code(archive))


def _read_code(archive: Archive) -> dict[str, bytes]:
    """The files of a user's command that an archive has, by their names below the working folder."""
    found, room = {}, MAX_CODE_BYTES
    for name in archive.names:
        if name.startswith(f"{CODE_FOLDER}/"):
            data = archive.read(name, room)
            room -= len(data)
            found[name.removeprefix(f"{CODE_FOLDER}/")] = data
    return found


def _check_and_agree(
    frozen: _FrozenRun,
    cluster: Cluster,
    store: Store,
    agree: Callable[[AuthorsProgram], None],
    *,
    data_dir: str | None = None,
) -> bool:
    """Refuse what is not the same here, and have what the author chose agreed to: whether that was needed. `data_dir`
    is the reader's choice."""
    spec, document = frozen.spec, frozen.document
    _require_same_task(spec, document)
    choices = tuple(each for each in _authors_choices(spec, cluster) if each != ("data_dir", data_dir))
    is_foreign = bool(choices) and not _was_started_here(str(document["id"]), spec, store)
    if is_foreign:
        agree(AuthorsProgram(frozen.source, choices, frozen.signer, frozen.code))
    elif cluster.provider == "local" and not spec.runs_task_program:
        _require_files(spec, frozen.code)
    _require_same_code(spec, document)
    if cluster.provider == "local":
        launch.check_local(spec, launch.local_machine())
        if spec.data_dir is not None and not Path(spec.data_dir).is_dir():
            raise _refusal(f"its data folder {spec.data_dir} does not exist on this machine")
    return is_foreign


def _make_launch(
    workspace: Workspace, name: str, frozen: _FrozenRun, specs: Sequence[RunSpec], *, require_goal: bool = False
) -> Launch:
    request = Request(name=name, workers=(frozen.spec.workers,))
    recorded = {"name": name, FROM: str(frozen.document["id"])}
    candidates = [Candidate(spec, {}) for spec in specs]
    return make_launch(workspace, request, candidates, recorded, require_goal=require_goal)


def _open(source: str, workspace: Workspace) -> Archive:
    path = Path(source)
    if "\0" not in source and path.exists():
        refuse_bundle(path, "--from")
        return open_verified(path)
    try:
        row = one_run(workspace.store, source)
    except NotFoundError:
        raise NotFoundError(
            f"There is no archive {source[:200]}, and no run of that name.", hint="mlbench download NAME"
        ) from None
    return open_verified(RunHandle(workspace, row).results)


def _find_signer(archive: Archive, signers: Path, workspace: Workspace) -> Signer | None:
    try:
        return check_origin(archive, signers)
    except OriginError as error:
        workspace.notify(f"Warning: {error.message}")
        return None


def _was_started_here(run_id: str, spec: RunSpec, store: Store) -> bool:
    """Whether this store recorded an experiment with exactly this run: its owner chose the program, or agreed to it.

    Runs that `mlbench status --refresh` found have no experiment here.
    """
    row = store.find_run(run_id)
    return (
        row is not None
        and row.run.spec.content_hash == spec.content_hash
        and store.find_experiment_of(row.run) is not None
    )


def _authors_choices(spec: RunSpec, cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Field and value of everything in the spec that decides which code, files and rights the run gets."""
    expected: dict[str, object] = {}
    if spec.runs_task_program:
        expected = _require_catalog_program(spec, cluster)
        yield from _choices_in_parameters(spec)
    else:
        yield "command", shlex.join(spec.argv)
    yield from _choices_in_method(spec)
    if cluster.engine == "kubernetes":  # set by this cluster for all runs, not by the author
        given = msgspec.structs.asdict(resolve_kubernetes(Request(), cluster))
        expected |= {f"kubernetes.{name}": value for name, value in given.items()}
    for name, value, usual in _list_leaves(spec):
        kind = LEAVES.get(name, Leaf.CHOICE)
        is_chosen = value not in (usual, expected.get(name, usual))
        if name != "argv" and kind in (Leaf.CHOICE, Leaf.CHECKED) and is_chosen:
            yield name.removeprefix("kubernetes."), str(value)


def _list_leaves(spec: RunSpec) -> Iterator[tuple[str, object, object]]:
    """Name, value and default of each field, in alphabetical order; those of `kubernetes` one by one."""
    for prefix, part in (("", spec), ("kubernetes.", spec.kubernetes)):
        for item in sorted(msgspec.structs.fields(part) if part else (), key=lambda item: item.name):
            if item.name != "kubernetes":
                default = item.default_factory() if callable(item.default_factory) else item.default
                yield prefix + item.name, getattr(part, item.name), default


def _choices_in_parameters(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """Parameters that are free text, such as the folder of checkpoints, unless they have the preset's value."""
    task = load_task(spec.task)
    usual = task.resolve(spec.preset)
    for name, value in spec.parameters.items():
        known = task.parameters.get(name)
        if known is None:
            raise _refusal(f'the task "{spec.task}" has no parameter "{name[:60]}" here')
        is_text = known.type in ("str", "list") and not known.choices
        is_number = isinstance(value, list) and all(isinstance(item, int | float) for item in value)
        if is_text and not is_number and value != usual[name]:
            yield f"parameters.{name}", str(value)
        elif known.check(value) != value:
            raise _refusal(f"its parameter {name} is {value!r}, which mlbench would not write")


def _choices_in_method(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """A method is taken by its name if it is mlbench's own; a file, or one of an installed package, is a choice."""
    method = spec.method
    if method and (method.get("name") not in OWN_METHODS or "file" in method):
        yield "method", ", ".join(f"{name} {value}" for name, value in method.items() if name in ("name", "file"))


def list_changes(spec: RunSpec) -> list[str]:
    """Everything in which a spec differs from its preset and from the defaults, as "name value"."""
    usual = find_rules(spec.task, spec.preset)
    preset = {} if usual is None else usual.preset
    found = [f"{name} {value}" for name, value in spec.parameters.items() if value != preset.get(name)]
    if spec.method:
        found.append(f"method {method_phrase(spec.method)}")
    for name, value, default in _list_leaves(spec):
        if LEAVES.get(name, Leaf.CHOICE) in (Leaf.VALUE, Leaf.CHOICE) and value != default and name != "workers":
            found.append(f"{name} {value}")
    return [one_line(text, 300) for text in found]


def _announce_changes(workspace: Workspace, spec: RunSpec) -> None:
    if changes := list_changes(spec):
        workspace.notify("\n  ".join([f"Of the original, besides the preset {one_line(spec.preset)}:", *changes]))


def _require_catalog_program(spec: RunSpec, cluster: Cluster) -> dict[str, object]:
    """Refuse a catalog task that would run another program than the installed catalog's; its image and path."""
    if find_rules(spec.task, spec.preset) is None:
        raise _refusal(f'the task "{spec.task}" is not in this catalog (mlbench {__version__})')
    task = load_task(spec.task)
    if spec.backend not in task.backends:
        raise _refusal(f'the task "{spec.task}" does not run on the backend "{one_line(spec.backend, 60)}"')
    if spec.argv != task.command:
        raise _refusal(
            f'it claims to be the task "{spec.task}", but its command is not that of the catalog',
            hint=f"Do not trust this archive. To run the task itself: mlbench run NAME {spec.workers} "
            f"--task {spec.task}",
        )
    if cluster.engine != "kubernetes":
        return {"task_path": task.search_path}
    try:
        return {"image": launch.task_image(task, cluster)}
    except MlbenchError:  # no registry is known here, so whatever it names is the author's choice
        return {}


def _cluster(spec: RunSpec, store: Store) -> Cluster:
    try:
        cluster = store.cluster(spec.cluster)
    except NotFoundError:
        raise _refusal(
            f'it ran on the cluster "{spec.cluster}", which is not known here',
            hint="mlbench attach-cluster, or mlbench create-cluster; then repeat the command",
        ) from None
    engine = cluster.engine
    if engine != spec.engine:
        raise _refusal(f'it ran on {spec.engine}, and the cluster "{spec.cluster}" is {engine} here')
    return cluster


def _require_same_task(spec: RunSpec, document: Any) -> None:
    """Reject a task whose goal, presets or command in the catalog have changed since the original run."""
    then = document.get("task")
    if then is None:
        return
    rules = find_rules(spec.task, spec.preset)
    if rules is None:
        raise _refusal(f'the task "{spec.task}" is not in this catalog (mlbench {__version__})')
    if rules.to_dict() != then:
        changed = [key for key, value in rules.to_dict().items() if then.get(key) != value]
        raise _refusal(
            f'the task "{spec.task}" has changed since ({", ".join(changed)})',
            hint=f"Install mlbench {document.get('mlbench')}, which made the archive.",
        )


def _require_same_code(spec: RunSpec, document: Any) -> None:
    """Reject a catalog task whose installed code, or that of the method, differs from that of the original run."""
    code = (document.get("provenance") or {}).get("code") or {}
    then = code.get("digest")
    if then is None:
        return
    now = collect_provenance(spec).code
    if now is None or (now.digest, now.method_digest) != (then, code.get("method_digest", "")):
        what = "method" if now is not None and now.digest == then else f'task "{spec.task}"'
        raise _refusal(
            f"the code of the {what} has changed since",
            hint=f"Install mlbench {document.get('mlbench')}, which made the archive.",
        )


def _require_files(spec: RunSpec, code: Mapping[str, bytes]) -> None:
    """Reject a command of one's own whose files are not in this folder."""
    missing = [word for word in spec.argv if word.removeprefix("./") in code and not Path(word).exists()]
    if missing:
        raise _refusal(
            f"this folder has no {one_line(missing[0], 100)}, which its command names",
            hint=f"Change to the folder that has it; the archive has a copy in its folder {CODE_FOLDER}.",
        )


def _refusal(reason: str, hint: str | None = None) -> UsageError:
    return UsageError(f"The run cannot be repeated here exactly: {reason}.", hint=hint or "mlbench run --help")


def _default_name(spec: RunSpec, word: str, more: int = 0) -> str:
    """ "demo-again" for "demo-2" and "demo-2-r1". `more`: characters that follow the number of workers."""
    base = (common_name(spec.name) or spec.name).removesuffix(f"-{spec.workers}")
    room = NAME_LENGTH - len(f"-{word}-{spec.workers}") - more
    return f"{base[:room].rstrip('-')}-{word}"
