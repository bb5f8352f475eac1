"""`mlbench status` of a cluster: its resources with their times, its price, and when it expires."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Literal, TypedDict, cast

from mlbench_cli import console
from mlbench_cli.commands._common import Format
from mlbench_cli.errors import MlbenchError
from mlbench_cli.model.cluster_details import PlanLineRecord, TimesRecord
from mlbench_cli.model.run import Cluster
from mlbench_cli.results.analysis.numbers import format_price
from mlbench_cli.storage.store import Store
from mlbench_cli.util.times import timestamp
from providers import registry
from providers.lifecycle import is_operation_running
from providers.machines import user_price_file

UNDER_WAY = ("being made", "being removed")


class ResourceDocument(TimesRecord, total=False):
    """One resource. `seconds` is its creation time; `found` is the cloud's current view, null if unknown."""

    state: str
    seconds: float | None
    removal: TimesRecord | None
    found: str | None


class ClusterFacts(TypedDict):
    """The cluster itself. `created`, `removed` and `expires` are RFC 3339 UTC; null if unknown or not yet."""

    name: str
    provider: str
    state: str
    created: str | None
    removed: str | None
    owner: str | None
    expires: str | None
    location: str | None
    nodes: int | None
    machine_type: str | None
    gpu: str | None
    gpus_per_node: int | None
    functional_only: bool


class PriceDocument(TypedDict):
    """The planned price, and the `amount` so far in `hours`; null if a price is unknown."""

    per_hour: float | None
    currency: str
    source: str | None
    table: str | None
    lines: list[PlanLineRecord]
    hours: float | None
    amount: float | None


class ClusterFinding(TypedDict):
    """A problem, and the next command."""

    code: str
    summary: str
    hint: str | None


class ClusterDocument(TypedDict):
    """The cluster for `-o json`. Times in seconds since its making, or its removal, began; null: not come to yet."""

    cluster: ClusterFacts
    price: PriceDocument | None
    provisioning_seconds: float | None
    removal_seconds: float | None
    resources: list[ResourceDocument]
    findings: list[ClusterFinding]


def show_cluster(store: Store, name: str, output: Format, *, cloud: bool = False) -> None:
    """Print the record of a cluster, even a deleted one; with `cloud`, also its current resources."""
    document = cluster_document(store, store.last_record(name), cloud=cloud)
    if output == Format.json:
        console.out_json(document)
    else:
        _show(document)


def cluster_document(store: Store, cluster: Cluster, *, cloud: bool = False) -> ClusterDocument:
    """The document of a cluster's record; with `cloud` the cloud is asked for each resource, too."""
    details = cluster.details
    expires = details.get("expires")
    resources = _resources(details)
    findings = _findings(store, cluster)
    if cloud and cluster.state != "removed":
        resources, missing = _compare_with_cloud(cluster, resources)
        findings += missing
    return {
        "cluster": {
            "name": cluster.name,
            "provider": cluster.provider,
            "state": cluster.state,
            "created": cluster.created or None,
            "removed": details.get("removed"),
            "owner": details.get("owner"),
            "expires": None if expires is None else timestamp(expires),
            "location": details.get("location"),
            "nodes": details.get("nodes"),
            "machine_type": details.get("machine_type"),
            "gpu": details.get("gpu"),
            "gpus_per_node": details.get("gpus_per_node"),
            "functional_only": bool(details.get("functional_only")),
        },
        "price": _price(cluster),
        "provisioning_seconds": _longest(resources, "ready"),
        "removal_seconds": _longest([item["removal"] for item in resources if item["removal"]], "gone"),
        "resources": resources,
        "findings": findings,
    }


# --- from the record ------------------------------------------------------------------------------------------------


def _resources(details: Mapping[str, list[TimesRecord]]) -> list[ResourceDocument]:
    """One line for each resource: its making, and its removal if that has begun."""
    removal = {(item["kind"], item["name"]): item for item in details.get("removal", [])}
    found: list[ResourceDocument] = []
    for item in [*details.get("provisioning", []), *details.get("extending", [])]:
        gone = removal.pop((item["kind"], item["name"]), None)
        own = {"state": _state(item, gone), "seconds": _span(item, "ready"), "removal": gone}
        found.append(cast(ResourceDocument, {**item, **own}))
    if details.get("failure"):
        found = [{**item, "state": "not finished"} if item["state"] in UNDER_WAY else item for item in found]
    if details.get("removed"):  # resources without a separate deletion were deleted with another one
        found = [{**item, "state": "gone"} for item in found]
    # What another machine has made is known from its removal only.
    return found + [_unmade(kind, name, _state(None, item), item) for (kind, name), item in removal.items()]


def _unmade(kind: str, name: str, state: str, removal: TimesRecord | None = None) -> ResourceDocument:
    return {
        "kind": kind,
        "name": name,
        "adopted": None,
        "began": None,
        "accepted": None,
        "ready": None,
        "waits": [],
        "seconds": None,
        "state": state,
        "removal": removal,
    }


def _span(item: TimesRecord, end: Literal["ready", "gone"]) -> float | None:
    """Seconds from the beginning to `end`; None if either time is unknown."""
    began, moment = item.get("began"), item.get(end)
    return None if began is None or moment is None else round(moment - began, 3)


def _state(made: TimesRecord | None, gone: TimesRecord | None) -> str:
    if gone is not None:
        return "being removed" if gone["gone"] is None else "gone"
    return "ready" if made and made["ready"] is not None else "being made"


def _price(cluster: Cluster) -> PriceDocument | None:
    """The price that was planned when the cluster was created, and the cost so far."""
    plan = cluster.details.get("plan")
    if not isinstance(plan, dict):
        return None
    each, hours = plan.get("price_per_hour"), _hours(cluster)
    return {
        "per_hour": each,
        "currency": plan.get("currency", "USD"),
        "source": plan.get("price_source"),
        "table": plan.get("price_table"),
        "lines": plan.get("lines", []),
        "hours": None if hours is None else round(hours, 3),
        "amount": None if each is None or hours is None else round(each * hours, 2),
    }


def _hours(cluster: Cluster) -> float | None:
    """How many hours the cluster has existed, or existed until its deletion."""
    if not cluster.created:
        return None
    removed = cluster.details.get("removed")
    end = datetime.fromisoformat(removed) if removed else datetime.now(UTC)
    return (end - datetime.fromisoformat(cluster.created)).total_seconds() / 3600


def _findings(store: Store, cluster: Cluster) -> list[ClusterFinding]:
    details, removed = cluster.details, cluster.state == "removed"
    found = []
    if failure := details.get("failure"):
        found.append(_finding(str(failure["code"]), str(failure["message"]), failure["hint"]))
    elif cluster.state in ("creating", "deleting") and not is_operation_running(store, cluster.name):
        again = "repeat the create-cluster command to resume; " if cluster.state == "creating" else ""
        hint = f"{again}mlbench delete-cluster {cluster.provider} {cluster.name}"
        found.append(
            _finding(
                "abandoned", f"It is {cluster.state}, but no mlbench process on this machine is working on it.", hint
            )
        )
    expires = details.get("expires")
    if not removed and expires is not None and expires < datetime.now(UTC).timestamp():
        late = console.duration(datetime.now(UTC).timestamp() - expires)
        found.append(_finding("expired", f"It expired {late} ago.", "mlbench gc --expired"))
    plan = details.get("plan") or {}
    if not removed:
        found += [_finding("planned", warning, None) for warning in plan.get("warnings", [])]
    if plan and plan.get("price_per_hour") is None:
        unknown = ", ".join(line["what"] for line in plan.get("lines", []) if line["price_per_hour"] is None)
        found.append(_finding("price_unknown", f"No known price for: {unknown}.", _own_prices()))
    return found


def _finding(code: str, summary: str, hint: str | None) -> ClusterFinding:
    return {"code": code, "summary": summary, "hint": hint}


def _own_prices() -> str:
    return f"Your price table takes precedence: {user_price_file()}"


# --- from the cloud -------------------------------------------------------------------------------------------------


def _compare_with_cloud(
    cluster: Cluster, resources: list[ResourceDocument]
) -> tuple[list[ResourceDocument], list[ClusterFinding]]:
    """Each resource with the cloud's current view ("found"), and findings about problems."""
    known = {(item["kind"], item["name"]): item for item in resources}
    findings: list[ClusterFinding] = []
    lines: list[ResourceDocument] = []
    for resource in registry.load(cluster.provider).resources(cluster):
        kind, name = resource.kind, resource.name
        item = known.pop((kind, name), None) or _unmade(kind, name, "unknown here")
        try:
            found = resource.find()
        except MlbenchError as error:
            findings.append(_finding(error.code, error.message, error.hint))
            lines.append({**item, "found": "unknown"})
            continue
        lines.append({**item, "found": found.state if found else None})
        if found is None and resource.remove_command and item["ready"] is not None:
            hint = f"repeat the create-cluster command, or mlbench delete-cluster {cluster.provider} {cluster.name}"
            findings.append(_finding("missing", f'The {resource.kind} "{resource.name}" no longer exists.', hint))
        if found is not None and not found.ours:
            words = f'The {resource.kind} "{resource.name}" was not created by mlbench.'
            findings.append(_finding("foreign", words, None))
        elif found is not None and (found.broken or found.differs):
            words = (
                f'The {resource.kind} "{resource.name}" is not in the expected state: {found.broken or found.differs}.'
            )
            findings.append(_finding("broken", words, f"mlbench delete-cluster {cluster.provider} {cluster.name}"))
    return lines + [{**item, "found": None} for item in known.values()], findings


# --- as text --------------------------------------------------------------------------------------------------------


def _show(document: ClusterDocument) -> None:
    cluster = document["cluster"]
    facts = [
        ("Cluster", f"{cluster['name']} ({cluster['provider']}), {cluster['state']}{_since(cluster)}"),
        ("Where", cluster["location"]),
        ("Machines", _machines(cluster)),
        ("Price", _price_words(document["price"])),
        ("Expires", _end(cluster)),
        ("Ready", _after(document["provisioning_seconds"])),
        ("Removed", _after(document["removal_seconds"])),
    ]
    console.out("\n".join(f"{title + ':':<10}{console.clean(str(text))}" for title, text in facts if text))
    if document["resources"]:
        console.out("")
        _show_resources(document["resources"])
    for finding in document["findings"]:
        hint = f"\nNext: {finding['hint']}" if finding["hint"] else ""
        console.out(f"\n{console.clean(finding['summary'], keep=chr(10))}{hint}")


def _show_resources(resources: Sequence[ResourceDocument]) -> None:
    shown: dict[str, list[str | None]] = {
        "RESOURCE": [item["kind"] for item in resources],
        "NAME": [item["name"] for item in resources],
        "STATE": [item["state"] for item in resources],
        "BEGAN": [_at(item.get("began")) for item in resources],
        "TOOK": [_took(item) for item in resources],
    }
    if any("found" in item for item in resources):
        shown["FOUND"] = [item.get("found") for item in resources]
    if any(item["removal"] for item in resources):
        shown["REMOVAL"] = [_removal_words(item["removal"]) for item in resources]
    shown["WAITED FOR"] = [_waits(item, item["removal"]) for item in resources]
    rows = [list(row) for row in zip(*shown.values(), strict=True)]
    console.out_table(
        list(shown), rows, droppable=[name for name in ("BEGAN", "WAITED FOR", "REMOVAL") if name in shown]
    )


def _waits(item: TimesRecord, gone: TimesRecord | None) -> str | None:
    waits = [*item["waits"], *(gone["waits"] if gone else [])]
    return "; ".join(f"{wait['reason']} ({console.duration(wait['seconds'])})" for wait in waits) or None


def _took(item: ResourceDocument) -> str | None:
    if item.get("adopted"):
        return "was there"
    return None if item["seconds"] is None else console.duration(item["seconds"])


def _removal_words(removal: TimesRecord | None) -> str | None:
    seconds = None if removal is None else _span(removal, "gone")
    return None if seconds is None else console.duration(seconds)


def _at(seconds: float | None) -> str | None:
    return None if seconds is None else f"+{console.duration(seconds)}"


def _since(cluster: ClusterFacts) -> str:
    made = f", created {console.ago(cluster['created'])}" if cluster["created"] else ""
    return made + (f" by {cluster['owner']}" if cluster["owner"] else "")


def _end(cluster: ClusterFacts) -> str | None:
    if cluster["expires"] is None or cluster["state"] == "removed":
        return None
    left = (datetime.fromisoformat(cluster["expires"]) - datetime.now(UTC)).total_seconds()
    return f"in {console.duration(left)} ({cluster['expires']})" if left > 0 else f"overdue ({cluster['expires']})"


def _machines(cluster: ClusterFacts) -> str | None:
    if cluster["nodes"] is None:
        return None
    gpus = f" with {cluster['gpus_per_node']} × {cluster['gpu']} each" if cluster["gpu"] else ""
    return f"{cluster['nodes']} × {cluster['machine_type'] or 'machines'}{gpus}"


def _price_words(planned: PriceDocument | None) -> str | None:
    if planned is None:
        return None
    each, currency = planned["per_hour"], planned["currency"]
    if not each:
        return format_price(each, currency)
    amount = f", {format_price(planned['amount'], currency)} so far" if planned["amount"] else ""
    return f"{format_price(each, currency)} an hour{amount}; {planned['source']}"


def _after(seconds: float | None) -> str | None:
    return None if seconds is None else f"after {console.duration(seconds)}"


def _longest(items: Sequence[TimesRecord], end: Literal["ready", "gone"]) -> float | None:
    """When the last of `items` reached `end`; None if one has not."""
    moments = [item.get(end) for item in items if item.get("began") is not None]
    known = [moment for moment in moments if moment is not None]
    return max(known) if known and len(known) == len(moments) else None
