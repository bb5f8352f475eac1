"""A cluster for the runs of one command: planned with them, created after one question, deleted when they have ended.

Whatever stops the command, the cluster is in the store and bears its tags in the cloud: the same command continues, and
`mlbench delete-cluster` or `mlbench gc` deletes. It stays only while results are on it that were not fetched.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from mlbench_cli import console
from mlbench_cli.api import RunHandle, check_archive
from mlbench_cli.clusters import changes as cluster_changes
from mlbench_cli.clusters.manage import CreationRequest, PlannedCluster, Ttl, plan_cluster, sketch_cluster
from mlbench_cli.commands._clusters import create_with_progress, delete_with_progress, show_plan
from mlbench_cli.errors import CleanupError, CredentialError, MlbenchError, Stopped, UsageError
from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.model.run import Cluster, Outcome, RunState
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.predict.machines import find_gpu
from mlbench_cli.results.analysis.numbers import format_price
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.runs.launch import public_images
from mlbench_cli.storage.run_folder import is_sealed
from mlbench_cli.storage.store import Store
from mlbench_cli.util.text import counted
from providers import registry
from providers.base import PartialSearchError, delete_command
from providers.lifecycle import hold_operation_lock
from providers.machines import load_shapes

RESERVE_SECONDS = 3600.0  # added to the cluster's lifetime for pulling images, a slow start and fetching
SLOWDOWN = 2.0  # factor by which repeated runs may be slower and still end before the cluster expires


@dataclass(frozen=True)
class Use:
    """The purpose of a new cluster. `seconds` is the maximum time of all runs, one after the other; `expected` is how
    long they will probably take, None if no such run is known."""

    name: str  # of the experiment
    runs: tuple[str, ...]
    seconds: float
    limit: str  # why it is not longer, in words
    keep: bool = False
    images: tuple[str, ...] = ()
    brings_code: bool = True  # the runs do, as opposed to programs of the user's that are in the image
    expected: float | None = None

    @property
    def ttl(self) -> Ttl:
        """When the cluster expires if nobody deletes it before."""
        hours = math.ceil((self.seconds + RESERVE_SECONDS) / 3600)
        return Ttl(f"{hours}h", 3600.0 * hours)


def use_of(store: Store, name: str, specs: Sequence[RunSpec], keep: bool) -> Use:
    """The use of a cluster by these runs, each of which may take all of its timeout."""
    longest = max(spec.timeout for spec in specs)
    limit = f"--timeout {console.duration(longest)}{' each' if len(specs) > 1 else ''}"
    names, images = tuple(spec.name for spec in specs), {spec.image for spec in specs if spec.image}
    seconds = sum(spec.timeout for spec in specs)
    brings_code = all(spec.runs_task_program for spec in specs)
    return Use(name, names, seconds, limit, keep, tuple(sorted(images)), brings_code, _expect_seconds(store, specs))


def _expect_seconds(store: Store, specs: Sequence[RunSpec]) -> float | None:
    """Expected total seconds of these runs, from completed runs like them on such machines; None if one has no such
    run."""

    def key(spec: RunSpec) -> tuple[object, ...]:
        method = tuple(sorted(spec.method.items()))
        return spec.task, spec.preset, tuple(spec.argv), method, spec.workers, spec.gpus_per_worker, spec.cluster_kind

    done = {key(row.run.spec): row.run for row in store.runs() if row.outcome is Outcome.COMPLETED}
    latest = [done.get(key(spec)) for spec in specs]
    times = [None if run is None else _read_seconds(run.folder) for run in latest]
    return None if None in times else sum(filter(None, times))


def _read_seconds(folder: Path) -> float | None:
    try:
        with Archive.open(folder) as archive:
            return archive.result["wall_seconds"]
    except MlbenchError:
        return None


def count_nodes(specs: Sequence[RunSpec]) -> int:
    """The workers of a cluster that is large enough for each of these runs."""
    return max(spec.workers for spec in specs)


def find_earlier(store: Store, request: CreationRequest) -> Cluster | None:
    """The cluster as an earlier command recorded it, which may have deleted it since."""
    found = next((item for item in store.clusters() if item.name == request.name), None)
    earlier = found or store.find_deleted_cluster(request.name)
    return earlier if earlier is not None and earlier.provider == request.provider.name else None


# --- the cluster, from its plan to its end --------------------------------------------------------------------------


@contextmanager
def make_cluster(store: Store, request: CreationRequest, use: Use, *, yes: bool, dry_run: bool) -> Iterator[Cluster]:
    """Show the plan, ask, create the cluster, and delete it at the end; with `dry_run`, only show it.

    The body starts the runs and waits for them. Ctrl-C and SIGTERM leave the cluster to its runs.
    """
    if dry_run:
        with _plan_or_sketch(store, request) as planned:
            planned = planned.with_ttl(request.ttl or _end_of(request, use))
            _show(planned, use)
            yield planned.cluster
        return
    with hold_operation_lock(store, request.name):  # of two commands at once, the second must not delete it
        with plan_cluster(store, request) as planned:
            known = store.find_cluster(planned.cluster.identity)
            _refuse_others(store, planned.cluster, known, use)
            planned = _with_end(planned, known, request, use)
            details = {**planned.cluster.details, "made_for": use.name, "is_kept": use.keep}
            planned.cluster = replace(planned.cluster, details=details)
            _show(planned, use)
            if planned.plan.total != 0:
                after = ", keep it" if use.keep else " and delete it afterwards"
                console.confirm(f"Create the cluster {request.name}, run {_listed(use.runs)} on it{after}?", yes=yes)
            cluster = _create(store, planned, use)
        try:
            yield cluster
        except (KeyboardInterrupt, Stopped):  # following a run turns KeyboardInterrupt into Stopped
            console.warn(
                f"The cluster {cluster.name} stays for its runs. The same command continues, and deletes it at the "
                f"end. To delete it now: {delete_command(cluster)}"
            )
            raise
        except MlbenchError as error:
            console.warn(f"The runs ended with an error: {error.message}")
            end_cluster(store, cluster, use, error)
            raise
        except BaseException:
            end_cluster(store, cluster, use)
            raise
        end_cluster(store, cluster, use)


def end_cluster(store: Store, cluster: Cluster, use: Use, error: MlbenchError | None = None) -> None:
    """Delete the cluster and prove that nothing is left, unless it is kept. Raises CleanupError if it has to stay.

    `error` is what ended the runs, which no error of the deletion may hide.
    """
    if use.keep:
        expires = ClusterDetails.of(cluster).expires
        until = f" until it expires in {console.duration(expires - time.time())}" if expires else ""
        console.note(f"The cluster {cluster.name} stays{until}. To delete it: {delete_command(cluster)}")
        return
    because = f"{error.message}\n" if error else ""
    if names := _unfetched(store, cluster):
        raise CleanupError(
            f"{because}The cluster {cluster.name} stays, because the results of {_listed(names)} are still on it.",
            hint=f"mlbench wait {names[0]}   fetches them; then: {delete_command(cluster)}",
            details={"cluster": cluster.name, "runs": names},
        )
    try:
        console.note(delete_with_progress(store, cluster))
    except CleanupError as left:
        left.message = f"{because}{left.message}"
        raise
    except MlbenchError as left:  # such as credentials that have expired during the runs
        raise CleanupError(
            f"{because}The cluster {cluster.name} stays and costs money, because it cannot be deleted: {left.message}",
            hint="\n".join(filter(None, (left.hint, f"{delete_command(cluster)}   then deletes it"))),
            details={**left.details, "cluster": cluster.name},
        ) from left


def end_earlier(store: Store, cluster: Cluster, use: Use) -> None:
    """Delete the cluster of runs that have all ended, if an earlier command was killed before it did."""
    if (left := store.find_cluster(cluster.identity)) is None or ClusterDetails.of(left).made_for != use.name:
        return
    with hold_operation_lock(store, left.name):
        end_cluster(store, left, use)


def _create(store: Store, planned: PlannedCluster, use: Use) -> Cluster:
    """The cluster. What a failed creation leaves is deleted, unless somebody stopped it, who may want to continue."""
    try:
        return create_with_progress(store, planned)
    except (KeyboardInterrupt, Stopped):
        raise
    except MlbenchError as error:
        left = store.find_cluster(planned.cluster.identity)
        if left is not None and not use.keep:
            console.warn(f"The creation of the cluster {left.name} failed: {error.message.partition(chr(10))[0]}")
            end_cluster(store, left, use, error)
            error.message = error.message.partition("\nOf the cluster")[0]
            error.hint = (error.hint or "").rpartition(f"{delete_command(left)} ")[0].rstrip() or None
        raise


def _unfetched(store: Store, cluster: Cluster) -> list[str]:
    """The runs that were started on the cluster, and whose archives are not here."""
    begun = (RunState.RUNNING, RunState.FINISHED)
    rows = [row for row in store.runs() if row.run.spec.cluster == cluster.name and row.state in begun]
    return [row.run.name for row in rows if not is_sealed(row.run)]


def _refuse_others(store: Store, cluster: Cluster, known: Cluster | None, use: Use) -> None:
    """Raise UsageError for a cluster of that name which was made for something else: it would be deleted."""
    if known is not None:
        if ClusterDetails.of(known).made_for != use.name:
            raise UsageError(
                f'There is already a cluster "{known.name}", which was not made for "{use.name}".',
                hint=f"--cluster {known.name}   runs there, or choose another NAME",
            )
        return
    places = (("location", cluster.location), ("project", cluster.account))
    try:
        found = registry.load(cluster.provider).discover({key: value for key, value in places if value})
    except PartialSearchError as error:
        found = error.found
    for item in found:
        if item.identity.matches(cluster.identity):
            raise UsageError(
                f'There is already a cluster "{item.name}" of mlbench, which this data folder does not know.',
                hint=f"Choose another NAME, or delete it: {delete_command(item)}",
            )


def _end_of(request: CreationRequest, use: Use) -> Ttl | None:
    return use.ttl if request.provider.name in registry.PAID else None


def _with_end(planned: PlannedCluster, known: Cluster | None, request: CreationRequest, use: Use) -> PlannedCluster:
    """The cluster with the end that was asked for, else with that which it has, if that leaves the runs their time."""
    recorded = None if known is None else ClusterDetails.of(known).expires
    if request.ttl is not None:
        return planned
    if known is not None and recorded is not None and recorded >= time.time() + use.seconds:
        return planned.with_end_of(known)
    return planned.with_ttl(_end_of(request, use))


@contextmanager
def _plan_or_sketch(store: Store, request: CreationRequest) -> Iterator[PlannedCluster]:
    """The plan; without credentials, a sketch of it."""
    with ExitStack() as stack:
        try:
            planned = stack.enter_context(plan_cluster(store, request))
        except (CredentialError, UsageError) as error:
            if error.details.get("configured", True) or (sketch := sketch_cluster(request)) is None:
                raise
            planned = sketch
        yield planned


# --- output ---------------------------------------------------------------------------------------------------------


def _show(planned: PlannedCluster, use: Use) -> None:
    """Print the plan: parts and prices, checks, minutes, total cost, and what happens if nobody is watching."""
    cluster, plan = planned.cluster, planned.plan
    show_plan(cluster, plan)
    checked, missing = _check(cluster) if plan.is_checked else ([], [])
    if checked:
        console.note(
            f"Checked: {', '.join(checked)}. Whether the machines are in stock shows only when they are created."
        )
    for line in missing:
        console.warn(line)
    up, down = registry.load(cluster.provider).minutes
    runs = f"run {_listed(use.runs)} (at most {console.duration(use.seconds)}: {use.limit})"
    end = "keep the cluster" if use.keep else f"delete the cluster (about {down} min) and look for leftovers"
    console.note(f"Steps: create {cluster.name} (about {up} min), {runs}, fetch and verify the archives, {end}.")
    for image in use.images:
        name, _, digest = image.partition("@")
        code = " The runs bring their own code." if use.brings_code else ""
        console.note(f"Image: {name}{f' ({digest[:19]})' if digest else ''}.{code}")
        if image in public_images():
            console.note("Docker Hub limits anonymous pulls per IP address.")
    if hourly := plan.limit:
        fixed = hourly * (up + down) / 60
        likely, most = (
            None if seconds is None else format_price(fixed + hourly * seconds / 3600, plan.currency)
            for seconds in (use.expected, use.seconds)
        )
        at_most, because = ("", "") if plan.total else ("at most ", ", as on demand, because a spot price is unknown")
        console.note(
            f"Cost: {at_most}{format_price(fixed, plan.currency)} to create and delete it, and "
            f"{at_most}{format_price(hourly, plan.currency)} per hour of the runs{because}."
        )
        if use.expected is not None:
            took = console.duration(use.expected)
            console.note(f"Expected: {at_most}{likely}, because such runs took {took} before.")
        console.note(f"Limit: {most}, if the runs last until their timeouts ({use.limit}).")
    elif plan.total is None:
        known = f"more than {format_price(plan.known_total, plan.currency)} per hour" if plan.known_total else "unknown"
        console.note(f"Cost: {known}, because the price of a part is unknown.")
    if (sentence := cluster_changes.describe_end(cluster)) is not None:
        ttl = ClusterDetails.of(cluster).ttl
        console.note(f"If this command is killed, repeat it to continue. The cluster expires after {ttl}. {sentence}")


def _check(cluster: Cluster) -> tuple[list[str], list[str]]:
    """What `mlbench doctor` finds in the cluster's cloud: topics that are in order, and lines about others."""
    if cluster.provider not in registry.PAID:
        return [], []
    cloud = registry.load(cluster.provider)
    passed: dict[str, None] = {}
    missing = []
    try:
        for check in cloud.check_account(cluster.account or None, cluster.location or None):
            if check.state == "ok" and check.topic is not None:
                passed[check.topic.summary] = None
            elif check.state != "ok" and check.exit_code:
                missing.append(f"{check.what}: {check.found}")
    except MlbenchError as error:
        missing.append(error.message)
    return list(passed), missing


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"


# --- verified archives ----------------------------------------------------------------------------------------------


def verify_all(runs: Sequence[RunHandle]) -> None:
    """Verify the archives that were brought home. Raises CleanupError that names one with a problem."""
    sealed = [run for run in runs if run.is_sealed]
    for run in sealed:
        found = check_archive(run.folder)
        if found.problems:
            raise CleanupError(
                f"The archive of {run.name} does not verify: {found.problems[0].message}",
                hint=f"mlbench verify {run.name}",
            )
    console.note(f"Verified {counted(len(sealed), 'archive')}.")


# --- a cluster like an archive's ------------------------------------------------------------------------------------


def describe_cluster(original: Sequence[Archive], runs: int) -> tuple[CreationRequest, Use]:
    """A cluster like the original's for so many further runs.

    Raises UsageError if the original ran a program of its author, or not on machines that a provider makes.
    """
    archive = original[0]
    spec = RunSpec.from_dict(archive.run["spec"])
    name, _, machine = str(spec.cluster_kind or "").partition("/")
    provider = registry.creators().get(name)
    if provider is None:
        raise UsageError(
            f"The original ran on {name or 'machines of an unknown type'}, and --create makes clusters of "
            f"{', '.join(registry.creators())}.",
            hint="Leave --create out, or name a cluster: --cluster NAME",
        )
    if not spec.runs_task_program:
        raise UsageError(
            "The original ran a command of its author, which is not started on another cluster.",
            hint="Run it yourself, then: mlbench reproduce ARCHIVE --with RUN",
        )
    options: dict[str, Any] = {"machine_type": machine} if machine else {}
    found = find_gpu(str((archive.environment["ranks"].get("0") or {}).get("device_name") or ""))
    # On a machine type that has none, GPUs were attached.
    if found is not None and any(shape.name == machine and not shape.gpu for shape in load_shapes(name)):
        options |= {"gpu_type": found.key, "num_gpus": spec.gpus_per_worker}
    longest = max(float(one.result["wall_seconds"] or 0.0) for one in original)
    # The same command finds the cluster of one that was interrupted.
    release = f"repro-{str(archive.run['spec_hash'])[:8]}"
    limit = f"{SLOWDOWN:g} times as long as the original"
    use = Use(release, (counted(runs, "run"),), SLOWDOWN * runs * longest, limit, expected=runs * longest)
    return CreationRequest(provider, spec.workers, release, options), use
