"""Error messages and records for a cluster operation that failed: what exists now, what it costs, how to delete it."""

from collections.abc import Mapping, Sequence

from mlbench_cli.errors import CleanupError, Explanation, Interrupted, MlbenchError, Stopped
from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.model.run import Cluster
from providers.base import Resource, delete_command


def as_mlbench_error(error: BaseException) -> Explanation:
    """Any error as one with a message for the user."""
    if isinstance(error, Explanation):
        return error
    if isinstance(error, KeyboardInterrupt):
        return Interrupted("Interrupted.")
    return MlbenchError(f"Internal error: {type(error).__name__}: {error}")


def failure_record(error: BaseException) -> dict[str, object]:
    """The error as the cluster's record keeps it: code, message, hint."""
    explained = as_mlbench_error(error)
    return {"code": explained.code, "message": explained.message, "hint": explained.hint}


def explain_error(error: BaseException, cluster: Cluster, existing: Sequence[Mapping[str, str]]) -> BaseException:
    """Add to `error` which resources of the cluster exist, what they cost and how to delete them.

    `existing` has kind, name and state of each. Errors that are neither exceptions nor signals come back unchanged.
    """
    if not isinstance(error, Exception | KeyboardInterrupt | Stopped):
        return error
    explained = as_mlbench_error(error)
    if not existing:
        return explained
    listed = ", ".join(f"{item['kind']} {item['name']} ({item['state']})" for item in existing)
    message = f'{explained.message}\nOf the cluster "{cluster.name}" these resources exist: {listed}.'
    details = ClusterDetails.of(cluster)
    if price := details.price_per_hour:
        message += f" They cost up to {price:.2f} {details.plan['currency']} an hour."
    elif details.plan and price is None:
        message += " Their price is unknown."
    hint = f"{delete_command(cluster)}   deletes them; to resume, repeat the command"
    if explained.hint:
        hint = f"{explained.hint}\n{hint}"
    explained.message, explained.hint = message, hint
    explained.details = {**explained.details, "exists": list(existing)}
    explained.args = (message,)
    return explained


def incomplete_deletion_error(cluster: Cluster, left: Sequence[Mapping[str, str]]) -> CleanupError:
    """The error for a deletion after which resources are left: kind, name, reason and command of each."""
    lines = "\n".join(f"  {item['kind']} {item['name']}: {item['reason']}\n    {item['command']}" for item in left)
    return CleanupError(
        f'These resources of the cluster "{cluster.name}" remain:\n{lines.rstrip()}',
        hint=f"{delete_command(cluster)}   continues; or delete each with the command below it",
        details={"leftovers": list(left)},
    )


def leftover_entry(resource: Resource, reason: str) -> dict[str, str]:
    """A resource that stays, in an error's document: kind, name, reason and the command that deletes it."""
    return {"kind": resource.kind, "name": resource.name, "reason": reason, "command": resource.remove_command}
