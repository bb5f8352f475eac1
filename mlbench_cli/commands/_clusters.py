"""What the commands on clusters share: how the life-cycle's steps are told, and how a cluster is found."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from mlbench_cli import console
from mlbench_cli.errors import MlbenchError, NotFoundError, UsageError, did_you_mean
from mlbench_cli.model import Cluster
from mlbench_cli.store import Store
from mlbench_cli.times import timestamp
from providers import registry
from providers.base import Plan
from providers.lifecycle import Step

Project = Annotated[str | None, typer.Option("--project", "-p", help="gke: project; default: the credentials' project")]
Location = Annotated[
    str | None, typer.Option("--zone", "-z", "--region", "--location", help="gke: zone or region; eks: region")
]

_TOLD = {
    "adopted": "exists already",
    "ready": "is ready",
    "remaking": "has to be recreated",
    "deleted": "is gone",
    "kept": "stays",
    "foreign": "was not made by mlbench and is not touched",
}


class StepTeller:
    """Tells the steps of a life-cycle on stderr: one line that changes while something is waited for."""

    def __init__(self) -> None:
        self._line = console.ProgressLine()
        self._topic = ""

    def __enter__(self) -> "StepTeller":
        return self

    def __exit__(self, *_: object) -> None:
        self._line.close()

    def __call__(self, step: Step) -> None:
        what = f"{step.kind} {step.name}"
        if told := _TOLD.get(step.action):
            self._line.close()
            because = f": {step.reason}" if step.reason and step.action in ("remaking", "kept") else ""
            console.note(f"{what} {told}{because} ({console.duration(step.seconds)})")
            return
        because = f": {step.reason}" if step.reason else ""
        limit = f" of at most {console.duration(step.deadline)}" if step.deadline else ""
        elapsed = f"elapsed {console.rough_duration(step.seconds)}{limit}"
        topic = f"{what} being {'removed' if step.action == 'deleting' else 'made'}"
        if step.action == "retrying":
            topic = f"{what} in trouble"
        if topic != self._topic:  # without a terminal each topic has its line at once, and then one now and then
            self._line.close()
            self._line, self._topic = console.ProgressLine(), topic
        self._line.update(lambda width: console.fit_parts([(topic + because, 0), (elapsed, 0)], width))


def scope_of(project: str | None, location: str | None) -> dict[str, str]:
    """Where to search for clusters that the store does not know."""
    return {key: value for key, value in (("project", project), ("location", location)) if value}


def discovered(names: list[str] | None, scope: dict[str, str]) -> tuple[list[Cluster], dict[str, MlbenchError]]:
    """All that is marked as ours; and which providers, of those not asked for by name, could not be asked."""
    found: list[Cluster] = []
    unseen: dict[str, MlbenchError] = {}
    for name in names or registry.CREATABLE:
        try:
            found += registry.load(name).discover(scope)
        except MlbenchError as error:
            if names:
                raise
            unseen[name] = error
    if unseen and len(unseen) == len(registry.CREATABLE):
        raise UsageError(
            "No provider can be asked: " + "; ".join(f"{name}: {error.message}" for name, error in unseen.items()),
            hint="mlbench doctor",
        )
    return found, unseen


def locate(store: Store, name: str, provider_name: str | None, scope: Mapping[str, str]) -> Cluster:
    """The cluster of that name as the store has it, else as its provider finds it by its marks.

    Raises NotFoundError where neither knows it, UsageError where it is another provider's.
    """
    known = {cluster.name: cluster for cluster in store.clusters()}
    wanted = registry.ALIASES.get(provider_name or "", provider_name)
    if name in known and wanted in (None, known[name].provider):
        return known[name]
    if name in known:
        raise UsageError(
            f'The cluster "{name}" is one of {known[name].provider}, not of {provider_name}.',
            hint=f"mlbench delete-cluster {known[name].provider} {name}",
        )
    if wanted is None:
        raise NotFoundError(
            f'There is no cluster "{name}".{did_you_mean(name, list(known))}',
            hint="mlbench list-clusters; one that another machine has made is found with its provider's name before it",
        )
    found = {cluster.name: cluster for cluster in registry.load(wanted).discover(scope)}
    if name in found:
        return found[name]
    near = did_you_mean(name, [*found, *(item.name for item in known.values() if item.provider == wanted)])
    raise NotFoundError(
        f'{wanted} has no cluster "{name}" of ours{_where(scope)}, whole or half made.{near}',
        hint="mlbench list-clusters",
        details={"found": sorted(found)},
    )


def recorded(store: Store, name: str) -> Cluster:
    """The record of a cluster, the last one where it was removed. Raises NotFoundError with the nearest name."""
    try:
        return store.cluster(name)
    except NotFoundError:
        from providers.lifecycle import removed

        if (gone := removed(store, name)) is not None:
            return gone
        raise


def show_plan(cluster: Cluster, plan: Plan) -> None:
    """The parts of a cluster and what they cost, on stderr."""
    rows: list[list[object]] = [
        [
            *(line.count, line.what, price(line.price, plan.currency)),
            *(price(_times(line.price, line.count), plan.currency), line.as_of),
        ]
        for line in plan.lines
    ]
    rows.append(["", f"cluster {cluster.name} in {plan.location}", "", price(plan.total, plan.currency), ""])
    console.note(console.format_table(["COUNT", "WHAT", "EACH/H", "TOGETHER/H", "PRICE OF"], rows))
    if plan.source:
        console.note(f"Prices: {plan.source}" + (f"; version {plan.table}" if plan.table else ""))
    for warning in plan.warnings:
        console.warn(warning)


def price(amount: float | None, currency: str) -> str:
    if amount is None:
        return "unknown"
    if not amount:
        return "free"
    return f"{amount:.2f} {currency}" if amount >= 0.01 else f"{amount:.2g} {currency}"


def document_of(cluster: Cluster) -> dict[str, Any]:
    """A cluster for `-o json`."""
    return {
        "name": cluster.name,
        "provider": cluster.provider,
        "state": cluster.state,
        "created": cluster.created or None,
        "details": {**cluster.details, **_times_in_words(cluster.details)},
    }


def _times_in_words(details: Mapping[str, Any]) -> dict[str, str]:
    """The record's moments in seconds since 1970 as RFC 3339."""
    return {key: timestamp(details[key]) for key in ("expires",) if isinstance(details.get(key), int | float)}


def _times(amount: float | None, count: int) -> float | None:
    return None if amount is None else amount * count


def _where(scope: Mapping[str, str]) -> str:
    return f" in {', '.join(scope.values())}" if scope else ""
