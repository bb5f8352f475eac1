"""Calibrations and other facts from finished runs of a task, for predictions and plans."""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlbench_cli.errors import MlbenchError, NotFoundError, UsageError, did_you_mean
from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.model.run import Cluster, JsonObject
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.predict.machines import Calibrated, load_machines
from mlbench_cli.predict.plan import Candidate, Offer, Question, keeps_samples, make_plan
from mlbench_cli.predict.samples import GoalPoint, choose_model, read_noise_scale, read_point
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.results.archive.verify import open_verified
from mlbench_cli.simulator.calibration import FILE, HOW, Calibration, find_link, parse_calibration, read_probe
from mlbench_cli.simulator.gloo import Link
from mlbench_cli.storage.run_folder import RunFolder
from mlbench_cli.storage.store import Store
from mlbench_cli.tasks.catalog import Task, load_catalog
from task_images.comm.methods import Method, MethodError
from task_images.comm.presets import PRESETS, resolve

DEFAULT_METHODS = ("fusion", "mgwfbp", "dear")
ANY = "any"
MAX_RUNS = 40  # of the task in the store, newest first, that are read without --from
# Parameters that runs of one task may differ in and still tell of one goal.
TUNED = ("batch_size", "global_batch", "micro_batch", "learning_rate", "epochs", "steps", "warmup")
MAX_DOCUMENT_BYTES = 64 << 20


def own_method(archive: Archive) -> Method:
    """The run's method; without one the task's own: a message after the backward pass, or torch's DDP."""
    given = archive.run["spec"].get("method")
    try:
        if isinstance(given, dict) and given:
            return Method.from_dict(given)
        if isinstance(given, str) and given in PRESETS:
            return resolve(given)
    except MethodError:
        pass
    return resolve("ddp" if str(archive.run["spec"]["task"]).endswith("_ddp") else "bsp")


def open_run(store: Store, name: str, unproven: bool = False) -> Archive:
    """The verified archive of a run, or at a path."""
    path = Path(name)
    if not path.exists():
        run = store.run(name).run
        if not RunFolder(run.folder).is_sealed:
            raise UsageError(f'The run "{run.name}" has no results yet.', hint=f"mlbench wait {run.name}")
        path = run.folder
    return open_verified(path, unproven=unproven)


def read_calibration(archive: Archive, *, required: bool) -> tuple[Calibration, Link, float]:
    """A run's calibration, its link, and the model's error on its own collectives."""
    if FILE not in archive.names:
        raise NotFoundError(f'The run "{archive.run["name"]}" was not calibrated: it has no {FILE}.', hint=HOW)
    calibration = parse_calibration(archive.read(FILE, MAX_DOCUMENT_BYTES))
    try:
        return (calibration, *find_link(calibration, archive.result.get("network")))
    except UsageError:
        if required:
            raise
        return calibration, Link(0.0, 0.0), 0.0


def read_run_probe(store: Store, name: str, unproven: bool) -> Link:
    """The link measured by a run's network probe. Raises NotFoundError if the run had no network."""
    with open_run(store, name, unproven) as archive:
        link = read_probe(archive.result.get("network"))
        if link is None:
            raise NotFoundError(
                f'The run "{archive.run["name"]}" did not probe a network between machines.',
                hint="Use a run with several workers on separate machines or on a shaped network.",
            )
        return link


def open_archives(
    store: Store, task: str, names: Sequence[str] | None, unproven: bool, stack: ExitStack
) -> list[Archive]:
    """The archives to predict from, the calibrated one first. Raises NotFoundError if there is none."""
    how = f"mlbench run cal 2 --task {task} --calibrate --num-cpus 1"
    if names:
        found = [stack.enter_context(open_run(store, name, unproven)) for name in names]
        for archive in found:
            if archive.run["spec"]["task"] != task:
                raise UsageError(f"The run {archive.run['name']} is of {archive.run['spec']['task']}, not of {task}.")
        return found
    found = []
    for row in store.iterate_runs(tasks=[task]):
        if len(found) == MAX_RUNS:
            break
        if not RunFolder(row.run.folder).is_sealed:
            continue
        try:
            archive = stack.enter_context(open_run(store, row.run.name, unproven))
            read_point(archive.run, archive.result)
        except MlbenchError:
            continue  # damaged, unproven, or short of its goal: others may do
        found.append(archive)
    base = next((archive for archive in found if FILE in archive.names), None)
    if base is None:
        raise NotFoundError(f"No calibrated run of {task} that reached its goal is known on this machine.", hint=how)
    return [base, *(archive for archive in found if archive is not base and _is_alike(archive, base))]


def _is_alike(archive: Archive, base: Archive) -> bool:
    """Whether two runs of a task have the same goal and model."""
    documents: list[Any] = [item.run["spec"]["parameters"] for item in (archive, base)]
    own, other = ({key: value for key, value in each.items() if key not in TUNED} for each in documents)
    return own == other


def make_question(
    task: Task, archives: Sequence[Archive], goal: str | None, methods: str | None
) -> tuple[Question, Archive]:
    """Collect facts about the task from archives; predictions are made from the first one."""
    base = archives[0]
    calibration, link, _ = read_calibration(base, required=False)
    if calibration.is_crowded:
        raise UsageError(
            f"The calibration {base.run['name']} had {calibration.ranks} ranks of {calibration.threads} threads on "
            f"{calibration.cores:g} cores: its times mostly reflect the scheduler.",
            hint=f"mlbench run cal 2 --task {task.name} --calibrate --num-cpus 1",
        )
    points: list[tuple[GoalPoint, Method]] = []
    threshold = _threshold(base, goal)
    for archive in archives:
        if _threshold(archive, goal) != threshold:
            raise UsageError(
                f"The goals of {archive.run['name']} and {base.run['name']} differ.", hint="Leave it out of --from"
            )
        points.append((read_point(archive.run, archive.result, goal), own_method(archive)))
    exact = [point for point, own in points if keeps_samples(own)] or [points[0][0]]
    samples = choose_model(task.name, exact, read_noise_scale(base.result))
    others = [_calibrated(archive) for archive in archives[1:] if FILE in archive.names]
    parameter = task.parameters.get("batch_size")
    spent = base.result["timings"].get("validation", {}).get("rank0", 0.0)
    scaled = points[0][0].samples / max(1.0, float(base.result.get("samples") or points[0][0].samples))
    memory = base.result["details"].get("peak_memory_bytes")
    question = Question(
        task.name,
        calibration,
        link if link.beta else None,
        _calibrated(base),
        samples,
        list(_choose_methods(methods, own_method(base), points, samples.samples)),
        validation=spent * scaled,
        max_rank_batch=None if parameter is None or parameter.max is None else int(parameter.max),
        memory_gib=memory / 2**30 if memory else None,
        devices=task.devices,
        can_resume="checkpoint" in task.parameters,
        others=others,
    )
    return question, base


def _threshold(archive: Archive, goal: str | None) -> float | None:
    """Of a goal of the run, its own by default; None if it did not pass it."""
    result: Any = archive.result
    passed = (result["details"].get("goals") or {}).get(goal) if goal else result.get("goal")
    return None if not passed else float(passed["threshold"])


def _calibrated(archive: Archive) -> Calibrated:
    calibration, link, _ = read_calibration(archive, required=False)
    machine: JsonObject = archive.environment["ranks"].get("0", {})
    gpu = str(machine.get("device_name") or "") if machine.get("device") == "cuda" else ""
    rate = calibration.batch / max(calibration.workload.seconds, 1e-9)
    return Calibrated(
        *(calibration.threads, gpu, rate, str(archive.result["details"].get("precision") or "fp32")),
        machine=str(archive.run["spec"].get("cluster_kind") or ""),
        link=link if link.beta else None,
    )


def _choose_methods(text: str | None, own: Method, points: Sequence[tuple[GoalPoint, Method]], samples: Any) -> Any:
    """Methods with their factor on the samples to the goal: 1 for exact methods, measured for others."""
    measured: dict[str, list[float]] = {}
    for point, method in points:
        expected = samples(point.batch)
        if expected:
            measured.setdefault(method.name, []).append(math.log(point.samples / expected))
    asked = text != ANY and text is not None
    names = list(PRESETS) if text == ANY else text.split(",") if text else [own.name, *DEFAULT_METHODS]
    for name in dict.fromkeys(names):
        if name not in PRESETS and name != own.name:
            near = did_you_mean(name, list(PRESETS))
            raise UsageError(f'There is no method "{name[:60]}".{near}', hint="mlbench methods")
        method = own if name == own.name else resolve(name)
        if keeps_samples(method):
            yield method, 1.0
        elif name in measured:
            yield method, math.exp(sum(measured[name]) / len(measured[name]))
        elif asked:
            raise UsageError(
                f"The method {name} changes how many samples the goal takes, and no run shows by how much.",
                hint=f"mlbench run {name} 2 --task TASK --method {name}, then: --from {name}-2",
            )


def estimate_on_cluster(
    store: Store,
    task: str,
    cluster: Cluster,
    goal: str | None = None,
    method: str | None = None,
    is_new: bool = False,
) -> Candidate:
    """The best of `task` on all workers of a planned or existing cluster, from the runs on this machine.

    The price is the cluster's own, and `is_new` adds the time to create it. Raises UsageError or NotFoundError if the
    machine type or the price is not known, or no calibrated run of the task.
    """
    known, details = load_catalog(), ClusterDetails.of(cluster)
    if task not in known:
        raise UsageError(f'There is no task "{task[:60]}".{did_you_mean(task, list(known))}', hint="mlbench tasks")
    fitting = [
        machine
        for machine in load_machines()
        if (machine.provider, machine.name) == (cluster.provider, details.machine_type)
        and machine.gpus == (details.gpus_per_node or 0)
    ]
    per_hour, nodes = details.plan.get("price_per_hour"), details.nodes or 0
    if not fitting or not nodes:
        raise UsageError(f"The speed of {details.machine_type} machines is not known, so nothing is planned for them.")
    if per_hour is None:
        raise UsageError("The price of the cluster is not known.", hint=f"mlbench prices update {cluster.provider}")
    with ExitStack() as stack:
        archives = open_archives(store, task, None, False, stack)
        question, _ = make_question(known[task], archives, goal, method)
        offer = Offer(fitting[0], cluster.location, float(per_hour) / nodes)
        return make_plan(
            replace(question, workers=(nodes,), batch_factors=(1.0,), is_started=not is_new), [offer]
        ).best[0]


def predictor(store: Store) -> Callable[[RunSpec, Cluster], float | None]:
    """A function from a run on a paid cluster to the seconds that the plan gives it; None if nothing supports that."""
    known: dict[tuple[object, ...], float | None] = {}

    def predict(spec: RunSpec, cluster: Cluster) -> float | None:
        method = spec.method.get("name")
        key = (cluster.identity, spec.task, spec.goal, spec.workers, method)
        if key not in known:
            details = ClusterDetails.of(cluster)
            own = replace(cluster, details={**cluster.details, "nodes": spec.workers})
            per_hour = details.plan.get("price_per_hour") if details.plan else None
            known[key] = None
            if per_hour is not None and spec.task in load_catalog():
                with suppress(MlbenchError):
                    known[key] = estimate_on_cluster(store, spec.task, own, spec.goal, method).seconds
        return known[key]

    return predict
