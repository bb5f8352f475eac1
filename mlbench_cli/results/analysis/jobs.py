"""Runs of one job: equal task or command, goal, data and time budget. What else differs (backend, machine, method, ...)
is in the label of a group.
"""

from collections.abc import Sequence
from functools import cached_property

from msgspec import Struct

from mlbench_cli.results.analysis.comparability import ComparisonKey, Title
from mlbench_cli.results.analysis.series import Group, Point, Series, label_groups
from mlbench_cli.util.text import counted, list_some


class Job(Struct, frozen=True, dict=True):
    """Groups of runs of the same job, which share a table and figures."""

    name: str
    groups: tuple[Group, ...]

    @property
    def title(self) -> str:
        """The task; of a user's command, its experiments and the command."""
        return _title_of(self.groups)

    @property
    def task(self) -> str:
        """The task of all groups."""
        return self.groups[0].task

    @cached_property
    def workers(self) -> list[int]:
        """All numbers of workers, ascending."""
        return sorted({point.workers for group in self.groups for point in group.points})

    @cached_property
    def sources(self) -> dict[str, str]:
        """The archives whose numbers are shown, with the names of their configurations."""
        return {
            run.source: self.name_of(group, point)
            for group in self.groups
            for point in group.points
            for run in point.shown
        }

    def name_of(self, group: Group, point: Point) -> str:
        """What distinguishes a configuration from the others of the job: "2 workers", "fusion", "2 workers
        (fusion)"."""
        size = counted(point.workers, "worker")
        if len(self.groups) == 1:
            return size
        return group.label if len(self.workers) == 1 else f"{size} ({group.label})"

    @property
    def what(self) -> str:
        """The timed quantity: "seconds to the goal" or "seconds of the run"."""
        if self.groups[0].after_time:
            return "time budget in seconds"
        if self.groups[0].key.measure:
            return "seconds of the run"
        return "seconds to the goal" if self.groups[0].metric else "seconds of the task"


def split_jobs(series: Series) -> list[Job]:
    """The groups by job, in the order of the series; names distinguish jobs of the same task."""
    found: dict[tuple[object, ...], list[Group]] = {}
    for group in series.groups:
        found.setdefault(_job_key(group.key), []).append(group)
    jobs = list(found.values())
    titles = [_title_of(groups) for groups in jobs]
    return [
        Job(title if titles.count(title) == 1 else f"{title} ({_difference(groups[0])})", label_groups(groups))
        for title, groups in zip(titles, jobs, strict=True)
    ]


def _title_of(groups: Sequence[Group]) -> str:
    """ "a, b: python train.py" of two experiments with one command."""
    titles = list(dict.fromkeys(title for group in groups for title in group.titles))
    commands = {title.command for title in titles}
    if len(titles) < 2:
        return str(titles[0])
    command = commands.pop() if len(commands) == 1 else groups[0].key.command
    return str(Title(list_some(list(dict.fromkeys(title.name for title in titles))), command))


def _job_key(key: ComparisonKey) -> tuple[object, ...]:
    """The key of a job; without a goal it includes the parameters, which define the amount of work. Those of a user's
    command do so only where the user says, who varies them to compare."""
    amount = () if key.goal or key.command else key.parameters
    shared = (key.task, key.preset, key.goal, key.metric, key.budget, key.data, key.synthetic)
    return (*shared, key.measure, key.label, key.command, key.judge, amount)


def _difference(group: Group) -> str:
    facts = group.facts
    words = [facts.get("preset"), facts.get("goal"), facts.get("synthetic"), facts.get("label"), facts.get("budget")]
    return ", ".join(word for word in words if word) or group.label
