"""Output of the cluster commands (steps, plans, prices, documents) and their common options."""

import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from mlbench_cli import console
from mlbench_cli.clusters import changes as cluster_changes
from mlbench_cli.clusters.manage import PlannedCluster
from mlbench_cli.model.run import Cluster
from mlbench_cli.results.analysis.numbers import format_price
from mlbench_cli.storage.store import Store
from mlbench_cli.util.times import timestamp
from providers.base import THIS_MACHINE, Plan, PlanLine
from providers.lifecycle import Step
from providers.machines import user_price_file

Project = Annotated[
    str | None,
    typer.Option(
        "--project", "-p", "--subscription", help="GKE project or AKS subscription; default: from the credentials"
    ),
]
Location = Annotated[
    str | None, typer.Option("--zone", "-z", "--region", "--location", help="GKE zone or region; EKS or AKS region")
]

_PHRASES = {
    "adopted": "exists already",
    "ready": "is ready",
    "recreating": "has to be recreated",
    "deleted": "is deleted",
    "kept": "stays",
    "foreign": "was not created by mlbench and is left alone",
}


class StepPrinter:
    """Prints the steps of an operation on stderr, with one line that is updated during a wait."""

    def __init__(self) -> None:
        self._line = console.ProgressLine()
        self._topic = ""

    def __enter__(self) -> "StepPrinter":
        return self

    def __exit__(self, *_: object) -> None:
        self._line.close()

    def __call__(self, step: Step) -> None:
        what = f"{step.kind} {step.name}"
        if phrase := _PHRASES.get(step.action):
            self._line.close()
            because = f": {step.reason}" if step.reason and step.action in ("recreating", "kept") else ""
            console.note(f"{what} {phrase}{because} ({console.duration(step.seconds)})")
            return
        because = f": {step.reason.removesuffix('.')}" if step.reason else ""
        limit = f" of at most {console.duration(step.deadline)}" if step.deadline else ""
        elapsed = f"elapsed {console.rough_duration(step.seconds)}{limit}"
        topic = f"{'deleting' if step.action == 'deleting' else 'creating'} {what}"
        if step.action == "retrying":
            topic = f"{what}: retrying after an error"
        # Without a terminal, each topic prints a line at once and then one from time to time. What a resource waits for
        # is part of the topic, except for numbers that move.
        subject = topic + re.sub(r"\d+", "", because)
        if subject != self._topic:
            self._line.close()
            self._line, self._topic = console.ProgressLine(), subject
        self._line.update(lambda width: console.fit_parts([(topic + because, 0), (elapsed, 0)], width))


def create_with_progress(store: Store, planned: PlannedCluster) -> Cluster:
    """Create the cluster as planned, with its end, and show the steps on stderr."""
    with StepPrinter() as report:
        cluster = planned.create(store, report, console.warn)
        return cluster_changes.set_end(store, cluster, report) if planned.moves_end else cluster


def delete_with_progress(
    store: Store,
    cluster: Cluster,
    *,
    keep_images: bool = False,
    check: Callable[[Cluster], None] = lambda cluster: None,
) -> str:
    """Delete the cluster, with its steps on stderr, unless `check` raises. Returns a sentence about what was done."""
    with StepPrinter() as report:
        certain = cluster_changes.delete_cluster(
            store, cluster, report, console.warn, keep_images=keep_images, check=check
        )
    if cluster.is_attached:
        return f"Removed the cluster {cluster.name} from mlbench; the cluster itself is unchanged."
    return f"The cluster {cluster.name} is deleted{'; no resources remain' if certain else ''}."


def show_plan(cluster: Cluster, plan: Plan) -> None:
    """Print the parts of a cluster and their prices on stderr."""
    rows: list[list[object]] = [
        [
            *(line.count, line.what, format_price(line.price, plan.currency)),
            *(format_price(None if line.price is None else line.price * line.count, plan.currency), line.as_of),
        ]
        for line in plan.lines
    ]
    total = format_price(plan.limit, plan.currency)
    is_limit = plan.total is None and plan.limit is not None
    rows.append(["", "total", "", f"at most {total} (on demand)" if is_limit else total, ""])
    table = console.format_table(["COUNT", "WHAT", "EACH/H", "ALL/H", "AS OF"], rows)
    place = "on this machine" if plan.location == THIS_MACHINE else f"in {plan.location}"
    console.note(f"The cluster {cluster.name} {place}:\n{table}")
    if plan.source:
        console.note(f"Prices: {plan.source}.")
    if unknown := [line for line in plan.lines if line.price is None]:
        rest = f"; the rest costs {format_price(plan.known_total, plan.currency)}/h" if plan.known_total else ""
        console.note(f"mlbench does not know the price of {_describe_unknown(unknown, plan.currency)}{rest}.")
        lacking = "\n".join(dict.fromkeys(f"  {line.row}" for line in unknown if line.row))
        columns = "cloud,item,region,on_demand,spot"
        console.note(f"To name a price, add a row below {columns} to {user_price_file()}:\n{lacking}")
    for warning in plan.warnings:
        console.warn(warning)


def _describe_unknown(lines: Sequence[PlanLine], currency: str) -> str:
    """The parts without a price, and why: "A, B, because ..."."""
    parts: dict[str | None, list[str]] = {}
    for line in lines:
        on_demand = f" ({format_price(line.on_demand, currency)}/h on demand)" if line.on_demand is not None else ""
        parts.setdefault(line.why_unknown, []).append(f"{line.what}{on_demand}")
    reasons = (f"{', '.join(whats)}{f', because {why}' if why else ''}" for why, whats in parts.items())
    return "; of ".join(reasons)


def cluster_document(cluster: Cluster) -> dict[str, Any]:
    """A cluster for `-o json`."""
    expires = cluster.details.get("expires")
    return {
        "name": cluster.name,
        "provider": cluster.provider,
        "account": cluster.account or None,
        "location": cluster.location or None,
        "state": cluster.state,
        "created": cluster.created or None,
        "details": {**cluster.details, **({"expires": timestamp(expires)} if isinstance(expires, int | float) else {})},
    }
