"""A campaign: a file with many settings, its experiments, and the results of their runs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from mlbench_cli.api.calibrated import predictor
from mlbench_cli.api.launches import Launch, OpenExperiment, make_launch
from mlbench_cli.api.runs import RunHandle
from mlbench_cli.api.workspace import API_COMMAND, Workspace
from mlbench_cli.model.run import JsonObject, RunRow, RunState
from mlbench_cli.results.analysis.campaign import Row, Sample, make_rows, read_sample
from mlbench_cli.results.analysis.rates import PublishedSeries, select_series
from mlbench_cli.runs.campaign import (
    Budget,
    Campaign,
    Forecast,
    History,
    Lot,
    RunEstimate,
    find_file,
    forecast,
    interleave,
    make_lots,
    settings_of,
)
from mlbench_cli.runs.campaign import read_campaign as read_file
from mlbench_cli.runs.defaults import default_cluster, with_defaults
from mlbench_cli.runs.matrix import MAX_MEMBERS

if TYPE_CHECKING:
    from mlbench_cli.runs.experiment import Candidate, Plan
    from mlbench_cli.runs.finished import FinishedRun

Follow = Callable[[OpenExperiment, RunHandle], "FinishedRun"]


@dataclass(frozen=True)
class CampaignStep:
    """One run of a campaign, in order: which run, of which experiment, and whether it is still to do."""

    lot: Lot
    candidate: "Candidate"
    run: RunHandle
    is_left: bool


@dataclass
class CampaignHandle:
    """The runs of a campaign in execution order. `history` holds the durations of similar runs."""

    workspace: Workspace
    campaign: Campaign
    lots: tuple[Lot, ...]
    published: tuple[PublishedSeries, ...]
    retry_failed: bool
    history: History
    launches: tuple[Launch, ...]
    steps: list[CampaignStep] = field(default_factory=list)

    @property
    def left(self) -> list[CampaignStep]:
        """The remaining steps."""
        return [step for step in self.steps if step.is_left]

    def plan(self) -> None:
        """Update the remaining steps."""
        self.steps = self._make_steps([launch.plan(retry_failed=self.retry_failed) for launch in self.launches])

    def _make_steps(self, plans: "Sequence[Plan]") -> list[CampaignStep]:
        by_lot = {id(lot): plan for lot, plan in zip(self.lots, plans, strict=True)}
        left = {run.id for plan in plans for run in plan.left}
        numbers = self._numbers()
        steps = []
        for lot, candidate in interleave(self.lots):
            run = by_lot[id(lot)].runs[numbers[id(candidate)]]
            handle = RunHandle(self.workspace, RunRow(run, RunState.CREATED, None))
            steps.append(CampaignStep(lot, candidate, handle, run.id in left))
        return steps

    def _numbers(self) -> dict[int, int]:
        """The place of each candidate in its lot, by the object's id: comparing candidates compares whole specs."""
        return {id(candidate): number for lot in self.lots for number, candidate in enumerate(lot.candidates)}

    def estimate(self, step: CampaignStep) -> RunEstimate:
        """The expected time and cost of the run."""
        return self.history.estimate(step.candidate.spec, step.lot.cluster)

    def forecast(self) -> Forecast:
        """The expected time and cost of all remaining runs."""
        entries = [(step.candidate.spec, step.lot.cluster) for step in self.left]
        return forecast(entries, len(self.steps), self.history)

    def render(self) -> None:
        """Check a run of each experiment as far as possible without a cluster. Raises the reason for a rejection."""
        for launch in self.launches:
            replace(launch, candidates=launch.candidates[:1]).render(offline=True)

    def run_all(self, follow: "Follow | None" = None, command_line: Sequence[str] = API_COMMAND) -> str | None:
        """Start and follow what is left, one run at a time; why it stopped before the last, None if it did not.

        `follow` does a step: it starts the run, waits for its end and returns it. This process is the queue of all
        experiments of the campaign until it returns. Raises UsageError if another process is the queue of one.
        """
        hours = self.campaign.max_hours
        budget = Budget(None if hours is None else hours * 3600, self.campaign.max_cost)
        with self._open(command_line) as opened:
            for step in self.left:
                if (refusal := budget.refusal(self.estimate(step))) is not None:
                    return refusal
                self._book(step, (follow or _follow)(opened[id(step.lot)], step.run), budget)
        return None

    @contextmanager
    def _open(self, command_line: Sequence[str]) -> Iterator[Mapping[int, OpenExperiment]]:
        """Be the queue of every experiment, record them, and find out what is left now."""
        with ExitStack() as held:
            opened = [
                held.enter_context(launch.open(command_line, retry_failed=self.retry_failed))
                for launch in self.launches
            ]
            for item in opened:
                item.record()
            self.steps = self._make_steps([item.plan for item in opened])
            yield {id(lot): item for lot, item in zip(self.lots, opened, strict=True)}

    def _book(self, step: CampaignStep, finished: "FinishedRun", budget: Budget) -> None:
        result = finished.result
        seconds = (result["wall_seconds"] if result else None) or 0.0
        amount = (result["price"] or {}).get("amount") if result else None
        budget.spend(seconds, amount or 0.0)
        if finished.outcome.is_success and seconds:
            self.history.add(step.candidate.spec, seconds)

    def settings(self, step: CampaignStep) -> dict[str, str]:
        """The settings that identify the run's row in the table."""
        return settings_of(step.lot, step.candidate, self.lots)

    def samples(self) -> list[Sample]:
        """The results of finished runs, in the order of the file."""
        order, numbers = {id(lot): number for number, lot in enumerate(self.lots)}, self._numbers()
        steps = sorted(self.steps, key=lambda step: (order[id(step.lot)], numbers[id(step.candidate)]))
        samples = []
        for step in steps:
            finished = step.run.finished
            if finished is None or finished.result is None:
                continue
            result: JsonObject = dict(finished.result)
            ranks = step.candidate.spec.world_size
            samples.append(read_sample(step.run.name, self.settings(step), ranks, result, self.campaign.metric))
        return samples

    def rows(self) -> list[Row]:
        """The table: one row per combination of settings with mean and interval, plus the published rows."""
        return make_rows(self.samples(), self.published)


def _follow(opened: OpenExperiment, run: RunHandle) -> "FinishedRun":
    if not run.is_finished:
        opened.start_run(run, detach=False)
    return run.wait()


def read_campaign(
    file: str, clusters: Sequence[str] = (), max_hours: float | None = None, max_cost: float | None = None
) -> Campaign:
    """Read a campaign from a file, or a shipped one by name. Arguments override the file."""
    found = read_file(find_file(file))
    return replace(
        found,
        clusters=tuple(clusters or found.clusters),
        max_hours=found.max_hours if max_hours is None else max_hours,
        max_cost=found.max_cost if max_cost is None else max_cost,
    )


def plan_campaign(workspace: Workspace, found: Campaign, most: int | None, *, retry_failed: bool) -> CampaignHandle:
    """The experiments of a campaign with their remaining runs. Raises UsageError for runs that cannot work, and for
    more than `most` of them.
    """
    published = select_series(found.published)
    store = workspace.store
    chosen = [store.cluster(name) for name in found.clusters] or [default_cluster(store)]
    entries = found.entries
    if len(chosen) == 1:
        entries = tuple((name, with_defaults(request, chosen[0])) for name, request in entries)
    lots = make_lots(replace(found, entries=entries), chosen, most=MAX_MEMBERS if most is None else most)
    launches = tuple(make_launch(workspace, lot.request, lot.candidates) for lot in lots)
    handle = CampaignHandle(workspace, found, lots, published, retry_failed, History(store, predictor(store)), launches)
    handle.plan()
    return handle
