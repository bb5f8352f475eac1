"""How long runs take and what they cost, by runs like them that have ended; and a limit on both."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.model.run import Cluster, RunState
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.runs.finished import read_undamaged
from mlbench_cli.storage.store import Store


@dataclass(frozen=True)
class RunEstimate:
    """Seconds of one run, and its price; None if nothing tells."""

    seconds: float | None
    price: float | None


class History:
    """What finished runs took, by what they ran: the same content apart from seed, else task, preset and size.

    `predict` gives the seconds of a run of which none is known; None if it cannot either.
    """

    def __init__(self, store: Store, predict: Callable[[RunSpec, Cluster], float | None] | None = None) -> None:
        self._predict = predict
        self._exact: dict[str, list[float]] = {}
        self._similar: dict[tuple[object, ...], list[float]] = {}
        for row in store.runs():
            if row.state is RunState.FINISHED and row.problem is None:
                finished = read_undamaged(row.run)
                seconds = finished.result["wall_seconds"] if finished and finished.result else None
                if finished and finished.outcome.is_success and seconds:
                    self.add(row.run.spec, seconds)

    def add(self, spec: RunSpec, seconds: float) -> None:
        """Remember what a finished run took."""
        self._exact.setdefault(_exact_key(spec), []).append(seconds)
        self._similar.setdefault(_similar_key(spec), []).append(seconds)

    def estimate(self, spec: RunSpec, cluster: Cluster) -> RunEstimate:
        """What a run is expected to take, in seconds, and to cost, in the plan's currency; None if nothing is known."""
        known = self._similar.get(_similar_key(spec))
        if known:  # otherwise there is none of the same content, whose hash takes longer
            known = self._exact.get(_exact_key(spec)) or known
        seconds = sum(known) / len(known) if known else self._predict(spec, cluster) if self._predict else None
        if seconds is None:
            return RunEstimate(None, None)
        plan = ClusterDetails.of(cluster).plan
        per_hour = plan.get("price_per_hour") if plan else 0.0 if cluster.provider == "local" else None
        return RunEstimate(seconds, None if per_hour is None else seconds / 3600 * per_hour)


def _exact_key(spec: RunSpec) -> str:
    return replace(spec, name="x", seed=0).content_hash


def _similar_key(spec: RunSpec) -> tuple[object, ...]:
    return spec.task, spec.preset, spec.world_size, spec.cluster, spec.device


@dataclass(frozen=True)
class Forecast:
    """What remains of an experiment: runs in all and remaining, seconds and price of those that are known, and how many
    are not. `ceiling` is the sum of the timeouts of all remaining runs, in seconds."""

    runs: int
    left: int
    seconds: float
    price: float | None
    unknown: int
    ceiling: float


def forecast(remaining: Sequence[tuple[RunSpec, RunEstimate]], total: int) -> Forecast:
    """What the `remaining` runs will take, of `total` runs of the experiment."""
    known = [estimate for _, estimate in remaining if estimate.seconds is not None]
    prices = [estimate.price for estimate in known if estimate.price is not None]
    return Forecast(
        runs=total,
        left=len(remaining),
        seconds=sum(estimate.seconds or 0.0 for estimate in known),
        price=sum(prices) if len(prices) == len(known) else None,
        unknown=len(remaining) - len(known),
        ceiling=sum(spec.timeout for spec, _ in remaining),
    )


@dataclass
class Budget:
    """What an experiment may still spend. `spent_*` grow with every run that this client waits for."""

    max_seconds: float | None
    max_cost: float | None
    spent_seconds: float = 0.0
    spent_cost: float = 0.0

    def refusal(self, estimate: RunEstimate) -> str | None:
        """Why the next run must not start; None if it may. A run of unknown length may start while anything is left."""
        seconds, price = estimate.seconds or 0.0, estimate.price or 0.0
        if self.max_seconds is not None and self.spent_seconds + seconds >= self.max_seconds:
            return f"{self.spent_seconds / 3600:.2f} of {self.max_seconds / 3600:g} hours are used up"
        if self.max_cost is not None and self.spent_cost + price >= self.max_cost:
            return f"{self.spent_cost:.2f} of a budget of {self.max_cost:g} is used up"
        return None

    def spend(self, seconds: float, cost: float) -> None:
        """Add what a run took and cost."""
        self.spent_seconds += seconds
        self.spent_cost += cost
