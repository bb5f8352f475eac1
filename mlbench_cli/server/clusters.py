"""The data of one cluster on the cluster page: nodes, their pods or processes, and resource usage over time."""

from collections.abc import Iterable, Sequence
from contextlib import suppress

from msgspec.structs import replace

from mlbench_cli.api import RunHandle
from mlbench_cli.errors import MlbenchError
from mlbench_cli.model.run import Cluster, JsonObject
from mlbench_cli.results.figures.curves import LatestSamples, resource_charts, use_now
from mlbench_cli.util.text import counted
from mlbench_cli.util.times import timestamp

USES = ("cpu", "memory", "network", "gpu", "gpu-memory")  # columns, if a rank uses it
DETAILS = ("location", "machine_type", "gpu")


def describe_cluster(cluster: Cluster, running: Sequence[RunHandle], number: int) -> JsonObject:
    """A cluster with the ranks of its `running` runs, their resource usage summed by node, and curves."""
    ranks, samples = [], []
    for run in running:
        with suppress(MlbenchError):  # a run that is temporarily unreadable
            states, latest = run.status()["ranks"], LatestSamples.of(run.name, run.latest_samples())
            uses = use_now(latest)
            ranks += [{**state, "run": run.name, "uses": uses.get(state["rank"], {})} for state in states]
            samples.append(latest)
    ranks.sort(key=lambda rank: (rank["node"] or "", rank["run"], rank["rank"]))
    expires = cluster.details.get("expires")
    facts = [str(cluster.details[name]) for name in DETAILS if cluster.details.get(name)]
    nodes = cluster.details.get("nodes")
    facts += [] if nodes is None else [counted(nodes, "node")]
    return {
        "name": cluster.name,
        "provider": cluster.provider,
        "engine": cluster.engine,
        "state": cluster.state,
        "facts": facts,
        "expires": timestamp(expires) if isinstance(expires, int | float) else None,
        "runs": [run.name for run in running],
        "ranks": ranks,
        "columns": [name for name in USES if any(name in rank["uses"] for rank in ranks)],
        "nodes": list(_sum_nodes(ranks)),
        "figures": [
            replace(chart, key=f"cluster-{number}-{chart.key}")
            for chart in resource_charts(samples, "", "seconds, of the last samples")
        ],
    }


def _sum_nodes(ranks: Sequence[JsonObject]) -> Iterable[JsonObject]:
    for node in dict.fromkeys(rank["node"] for rank in ranks):
        own = [rank for rank in ranks if rank["node"] == node]
        names = dict.fromkeys(name for rank in own for name in rank["uses"])
        # GPU utilization is averaged, everything else is summed.
        sums = {name: sum(rank["uses"].get(name, 0.0) for rank in own) for name in names}
        if "gpu" in sums:
            sums["gpu"] /= sum("gpu" in rank["uses"] for rank in own)
        yield {"node": node, "runs": list(dict.fromkeys(rank["run"] for rank in own)), "ranks": len(own), "uses": sums}
