"""The part of `mlbench status` that is about a cluster: its resources with their times, its price, its end."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from mlbench_cli import console
from mlbench_cli.clusters import find_record
from mlbench_cli.commands._clusters import price
from mlbench_cli.commands._common import Format
from mlbench_cli.errors import MlbenchError
from mlbench_cli.model import Cluster
from mlbench_cli.store import Store
from mlbench_cli.times import timestamp
from providers import registry

UNDER_WAY = ("being made", "being removed")


def show_cluster(store: Store, name: str, output: Format, *, cloud: bool = False) -> None:
    """Print what the record of a cluster tells, also of one that was removed; with `cloud` what is there now, too."""
    document = cluster_document(store, find_record(store, name), cloud=cloud)
    if output == Format.json:
        console.out_json(document)
    else:
        _show(document)


def cluster_document(store: Store, cluster: Cluster, *, cloud: bool = False) -> dict[str, Any]:
    """The cluster for `-o json`. Times in seconds since its making, or its removal, began; null: not come to yet."""
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
            **{key: details.get(key) for key in ("location", "nodes", "machine_type", "gpu", "gpus_per_node")},
            "functional_only": bool(details.get("functional_only")),
        },
        "price": _price(cluster),
        "provisioning_seconds": _longest(resources, "ready"),
        "removal_seconds": _longest([item["removal"] for item in resources if item["removal"]], "gone"),
        "resources": resources,
        "findings": findings,
    }


# --- what the record tells ------------------------------------------------------------------------------------------


def _resources(details: Any) -> list[dict[str, Any]]:
    """One line for each resource: its making, and its removal if that has begun."""
    removal = {(item["kind"], item["name"]): item for item in details.get("removal", [])}
    found = []
    for item in [*details.get("provisioning", []), *details.get("scaling", [])]:
        gone = removal.pop((item["kind"], item["name"]), None)
        seconds = None if item["ready"] is None else round(item["ready"] - item["began"], 3)
        found.append({**item, "state": _state(item, gone), "seconds": seconds, "removal": gone})
    if details.get("failure"):
        found = [{**item, "state": "not finished"} if item["state"] in UNDER_WAY else item for item in found]
    if details.get("removed"):  # what has no removal of its own went with something else
        found = [{**item, "state": "gone"} for item in found]
    # What another machine has made is known from its removal only.
    unmade: dict[str, Any] = {
        "adopted": None,
        "began": None,
        "accepted": None,
        "ready": None,
        "waits": [],
        "seconds": None,
    }
    return found + [
        {"kind": kind, "name": name, **unmade, "state": _state(None, item), "removal": item}
        for (kind, name), item in removal.items()
    ]


def _state(made: Any, gone: Any) -> str:
    if gone is not None:
        return "being removed" if gone["gone"] is None else "gone"
    return "being made" if made["ready"] is None else "ready"


def _price(cluster: Cluster) -> dict[str, Any] | None:
    """What was planned when the cluster was made, and what that amounts to by now."""
    plan = cluster.details.get("plan")
    if not isinstance(plan, dict):
        return None
    each, hours = plan.get("price_per_hour"), _hours(cluster)
    return {
        "per_hour": each,
        "currency": plan.get("currency"),
        "source": plan.get("price_source"),
        "table": plan.get("price_table"),
        "lines": plan.get("lines", []),
        "hours": None if hours is None else round(hours, 3),
        "amount": None if each is None or hours is None else round(each * hours, 2),
    }


def _hours(cluster: Cluster) -> float | None:
    """How long it has been there, or was."""
    if not cluster.created:
        return None
    removed = cluster.details.get("removed")
    end = datetime.fromisoformat(removed) if removed else datetime.now(UTC)
    return (end - datetime.fromisoformat(cluster.created)).total_seconds() / 3600


def _findings(store: Store, cluster: Cluster) -> list[dict[str, Any]]:
    from providers.operation_lock import is_operation_running

    details, removed = cluster.details, cluster.state == "removed"
    found = []
    if failure := details.get("failure"):
        found.append(_finding(str(failure["code"]), str(failure["message"]), failure["hint"]))
    elif cluster.state in ("creating", "deleting") and not is_operation_running(store, cluster.name):
        again = "the same create-cluster command goes on with it; " if cluster.state == "creating" else ""
        hint = f"{again}mlbench delete-cluster {cluster.provider} {cluster.name}"
        found.append(_finding("abandoned", f"It is {cluster.state}, and no mlbench of this machine is at it.", hint))
    expires = details.get("expires")
    if not removed and expires is not None and expires < datetime.now(UTC).timestamp():
        late = console.duration(datetime.now(UTC).timestamp() - expires)
        found.append(_finding("expired", f"It is past its end by {late}.", "mlbench gc --expired"))
    plan = details.get("plan") or {}
    if not removed:
        found += [_finding("planned", warning, None) for warning in plan.get("warnings", [])]
    if plan and plan.get("price_per_hour") is None:
        unknown = ", ".join(line["what"] for line in plan.get("lines", []) if line["price_per_hour"] is None)
        found.append(_finding("price_unknown", f"No price is known of: {unknown}.", _own_prices()))
    return found


def _finding(code: str, summary: str, hint: str | None) -> dict[str, Any]:
    return {"code": code, "summary": summary, "hint": hint}


def _own_prices() -> str:
    from providers.pricing import user_price_file

    return f"A price table of your own goes first: {user_price_file()}"


# --- what the cloud tells -------------------------------------------------------------------------------------------


def _compare_with_cloud(
    cluster: Cluster, resources: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Each resource with what the cloud says of it now ("found"), and findings on what is not as it should be."""
    known = {(item["kind"], item["name"]): item for item in resources}
    findings = []
    lines = []
    for resource in registry.load(cluster.provider).resources(cluster):
        unmade: dict[str, Any] = {
            "kind": resource.kind,
            "name": resource.name,
            "state": "unknown here",
            "seconds": None,
        }
        item = known.pop((resource.kind, resource.name), {**unmade, "waits": [], "ready": None, "removal": None})
        try:
            found = resource.find()
        except MlbenchError as error:
            findings.append(_finding(error.code, error.message, error.hint))
            lines.append({**item, "found": "unknown"})
            continue
        lines.append({**item, "found": found.state if found else None})
        if found is None and resource.remove_command and item["ready"] is not None:
            hint = f"the create-cluster command again, or mlbench delete-cluster {cluster.provider} {cluster.name}"
            findings.append(_finding("missing", f'The {resource.kind} "{resource.name}" has gone.', hint))
        if found is not None and not found.ours:
            words = f'The {resource.kind} "{resource.name}" was not made by mlbench.'
            findings.append(_finding("foreign", words, None))
        elif found is not None and (found.broken or found.differs):
            words = f'The {resource.kind} "{resource.name}" is not as it should be: {found.broken or found.differs}.'
            findings.append(_finding("broken", words, f"mlbench delete-cluster {cluster.provider} {cluster.name}"))
    return lines + [{**item, "found": None} for item in known.values()], findings


# --- as text --------------------------------------------------------------------------------------------------------


def _show(document: dict[str, Any]) -> None:
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


def _show_resources(resources: Sequence[dict[str, Any]]) -> None:
    shown = {
        "RESOURCE": [item["kind"] for item in resources],
        "NAME": [item["name"] for item in resources],
        "STATE": [item["state"] for item in resources],
        "BEGAN": [_at(item.get("began")) for item in resources],
        "TOOK": [_took(item) for item in resources],
    }
    if any("found" in item for item in resources):
        shown["FOUND"] = [item.get("found") for item in resources]
    if any(item["removal"] for item in resources):
        shown["REMOVAL"] = [_seconds(item["removal"], "gone") for item in resources]
    shown["WAITED FOR"] = [_waits(item, item["removal"]) for item in resources]
    rows = [list(row) for row in zip(*shown.values(), strict=True)]
    console.out_table(
        list(shown), rows, droppable=[name for name in ("BEGAN", "WAITED FOR", "REMOVAL") if name in shown]
    )


def _waits(item: dict[str, Any], gone: dict[str, Any] | None) -> str | None:
    waits = [*item["waits"], *(gone["waits"] if gone else [])]
    return "; ".join(f"{wait['reason']} ({console.duration(wait['seconds'])})" for wait in waits) or None


def _took(item: dict[str, Any]) -> str | None:
    if item.get("adopted"):
        return "was there"
    return None if item["seconds"] is None else console.duration(item["seconds"])


def _seconds(item: dict[str, Any] | None, end: str) -> str | None:
    return None if item is None or item[end] is None else console.duration(item[end] - item["began"])


def _at(seconds: float | None) -> str | None:
    return None if seconds is None else f"+{console.duration(seconds)}"


def _since(cluster: dict[str, Any]) -> str:
    told = f", made {console.ago(cluster['created'])}" if cluster["created"] else ""
    return told + (f" by {cluster['owner']}" if cluster["owner"] else "")


def _end(cluster: dict[str, Any]) -> str | None:
    if cluster["expires"] is None or cluster["state"] == "removed":
        return None
    left = (datetime.fromisoformat(cluster["expires"]) - datetime.now(UTC)).total_seconds()
    return f"in {console.duration(left)} ({cluster['expires']})" if left > 0 else f"overdue ({cluster['expires']})"


def _machines(cluster: dict[str, Any]) -> str | None:
    if cluster["nodes"] is None:
        return None
    gpus = f" with {cluster['gpus_per_node']} × {cluster['gpu']} each" if cluster["gpu"] else ""
    return f"{cluster['nodes']} × {cluster['machine_type'] or 'machines'}{gpus}"


def _price_words(told: dict[str, Any] | None) -> str | None:
    if told is None:
        return None
    if not told["per_hour"]:
        return price(told["per_hour"], told["currency"])
    amount = "" if told["amount"] is None else f", {price(told['amount'], told['currency'])} up to now or the end"
    return f"{price(told['per_hour'], told['currency'])} an hour{amount}; {told['source']}"


def _after(seconds: float | None) -> str | None:
    return None if seconds is None else f"after {console.duration(seconds)}"


def _longest(items: Sequence[dict[str, Any]], end: str) -> float | None:
    """When the last of `items` came to its end; None if one has not."""
    moments = [item.get(end) for item in items if item.get("began") is not None]
    return None if not moments or None in moments else max(moment for moment in moments if moment is not None)
