"""The finding about a slow node or link, from the search of the task `allreduce` among pairs of ranks."""

from collections.abc import Mapping
from typing import Any

from mlbench_cli.model.run import Finding
from mlbench_cli.util.text import one_line

SLOW = {"node": "slow_node", "link": "slow_link", "several": "slow_nodes"}


def find_slow_links(details: Mapping[str, Any]) -> Finding | None:
    """The finding from a search among pairs; None if nothing is slow, or there was no search."""
    found = details.get("search")
    verdict = found.get("verdict") if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping) or not isinstance(verdict, Mapping):
        return None
    kind, ranks, hosts = verdict.get("kind"), verdict.get("ranks"), found.get("hosts")
    if (
        not isinstance(kind, str)
        or kind not in SLOW
        or not isinstance(ranks, list)
        or not all(type(rank) is int for rank in ranks)
    ):
        return None
    known = hosts if isinstance(hosts, list) else []
    names = [one_line(str(known[rank]), 80) if 0 <= rank < len(known) else "" for rank in ranks[:16]]
    shown = [f"rank {rank}{f' on {name}' if name else ''}" for rank, name in zip(ranks[:16], names, strict=True)]
    what = f"The link between {' and '.join(shown)} is slow" if kind == "link" else f"{', '.join(shown)}: slow"
    marked = next((name for name in names if name), None)
    return Finding(
        SLOW[kind],
        f"{what}: {one_line(str(found.get('reason')), 200)}.",
        hint="Exclude the machine and run again"
        + (f"; on Kubernetes: kubectl label node {marked} mlbench.io/suspect={kind}" if marked else "")
        + ".",
        evidence={"ranks": ranks[:16], "hosts": names, "slow": verdict.get("slow")},
    )
