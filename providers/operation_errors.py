"""What is said, and kept, of work on a cluster that did not come to its end: what exists now and how to remove it."""

from collections.abc import Mapping, Sequence
from typing import Any

from mlbench_cli.errors import CleanupError, Explanation, Interrupted, MlbenchError
from mlbench_cli.model import Cluster
from providers.base import Resource


def as_mlbench_error(error: BaseException) -> Explanation:
    """Any error as one that a person can be told."""
    if isinstance(error, Explanation):
        return error
    if isinstance(error, KeyboardInterrupt):
        return Interrupted("Interrupted.")
    return MlbenchError(f"Internal error: {type(error).__name__}: {error}")


def failure_record(error: BaseException) -> dict[str, Any]:
    """What stopped the work, for the cluster's record."""
    told = as_mlbench_error(error)
    return {"code": told.code, "message": told.message, "hint": told.hint}


def explain_error(error: BaseException, cluster: Cluster, there: Sequence[Mapping[str, str]]) -> BaseException:
    """`error` with what exists of the cluster, what that costs and how to remove it. `there`: kind, name, state."""
    if not isinstance(error, Exception | KeyboardInterrupt):
        return error
    told = as_mlbench_error(error)
    if not there:
        return told
    listed = ", ".join(f"{item['kind']} {item['name']} ({item['state']})" for item in there)
    message = f'{told.message}\nOf the cluster "{cluster.name}" there is now: {listed}.'
    plan = cluster.details.get("plan") or {}
    if price := plan.get("price_per_hour"):
        message += f" While it is there it costs up to {price:.2f} {plan['currency']} an hour."
    elif plan and price is None:
        message += " What it costs while it is there is not known."
    hint = f"{delete_command(cluster)}   removes it; the same create-cluster command goes on with it"
    if told.hint:
        hint = f"{told.hint}\n{hint}"
    told.message, told.hint, told.details = message, hint, {**told.details, "exists": list(there)}
    told.args = (message,)
    return told


def incomplete_deletion_error(cluster: Cluster, left: Sequence[Mapping[str, str]]) -> CleanupError:
    """The error for a removal after which something is left: kind, name, reason and command of each."""
    lines = "\n".join(f"  {item['kind']} {item['name']}: {item['reason']}\n    {item['command']}" for item in left)
    return CleanupError(
        f'Of the cluster "{cluster.name}" this is left:\n{lines.rstrip()}',
        hint=f"{delete_command(cluster)}   goes on; or remove each by the command below it",
        details={"leftovers": list(left)},
    )


def leftover_entry(resource: Resource, reason: str) -> dict[str, str]:
    return {"kind": resource.kind, "name": resource.name, "reason": reason, "command": resource.remove_command}


def delete_command(cluster: Cluster) -> str:
    return f"mlbench delete-cluster {cluster.provider} {cluster.name}"
