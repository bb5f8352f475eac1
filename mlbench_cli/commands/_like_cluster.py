"""A cluster like that of an archive's run: made after its price was shown, and deleted when the runs have ended."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mlbench_cli import console
from mlbench_cli.clusters.manage import CreationRequest, Ttl, plan_cluster
from mlbench_cli.commands._clusters import create_with_progress, delete_with_progress, show_plan
from mlbench_cli.errors import Stopped, UsageError
from mlbench_cli.model.run import Cluster
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.predict.machines import find_gpu, load_machines
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.storage.store import Store
from providers import registry
from providers.operation_errors import delete_command

RESERVE_SECONDS = 3600.0  # of the cluster's life, for images and a slow start
SLOWDOWN = 2.0  # of the runs, up to which they end before the cluster does


def describe_cluster(original: Sequence[Archive], runs: int) -> CreationRequest:
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
    # GPUs that are added to a machine type, instead of being part of it.
    added = [each.gpu for each in load_machines() if each.priced_as and each.kind == spec.cluster_kind]
    if found is not None and found.key in added:
        options |= {"gpu_type": found.key, "num_gpus": spec.gpus_per_worker}
    seconds = runs * max(float(one.result["wall_seconds"] or 0.0) for one in original)
    hours = math.ceil((SLOWDOWN * seconds + RESERVE_SECONDS) / 3600)
    ttl = Ttl(f"{hours}h", 3600.0 * hours) if name in registry.PAID else None
    # The same command finds the cluster of one that was interrupted.
    release = f"repro-{str(archive.run['spec_hash'])[:8]}"
    return CreationRequest(provider, spec.workers, release, options, ttl=ttl)


@contextmanager
def make_cluster(store: Store, request: CreationRequest, *, yes: bool, dry_run: bool) -> Iterator[Cluster]:
    """Create the cluster after its price was shown, and delete it at the end; with `dry_run`, only show it.

    After Ctrl-C or SIGTERM it stays until it expires, like the runs on it.
    """
    with plan_cluster(store, request) as planned:
        show_plan(planned.cluster, planned.plan)
        if request.ttl is not None:
            console.note(f"It is deleted after the runs, and expires after {request.ttl.text}.")
        if dry_run:
            yield planned.cluster
            return
        if planned.plan.total != 0:
            console.confirm(f"Create the cluster {request.name}, and delete it after the runs?", yes=yes)
        cluster = create_with_progress(store, planned)
    try:
        yield cluster
    except (KeyboardInterrupt, Stopped):  # whoever follows a run turns the former into the latter
        console.warn(f"The cluster {cluster.name} stays for its runs. To delete it: {delete_command(cluster)}")
        raise
    except BaseException:
        console.note(delete_with_progress(store, cluster))
        raise
    console.note(delete_with_progress(store, cluster))
