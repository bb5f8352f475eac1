"""Campaigns: a file that asks for many runs at once, and what it takes to do them.

A campaign file is a spec file (`mlbench run -f`) with more keys:

    title        headline of table and figures
    runs         list of spec files' mappings; each has what stands at the top of the file, and its own keys on top
    clusters     names of clusters; everything runs on each of them
    metric       what is compared: the name of a reported metric; default: throughput, else seconds
    published    series of others to put beside (results/analysis/rates.py)
    max-hours, max-cost   no further run starts that would exceed them

Each entry of `runs` is an experiment on each cluster, with everything that experiments have: a matrix with include and
exclude, repeats, resuming by content hash.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlbench_cli.errors import NotFoundError, UsageError, did_you_mean
from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.model.goals import is_finite_number
from mlbench_cli.model.run import Cluster, RunState
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.runs.experiment import Candidate, expand
from mlbench_cli.runs.finished import read_undamaged
from mlbench_cli.runs.launch import Machine
from mlbench_cli.runs.matrix import MAX_MEMBERS, hint_for
from mlbench_cli.runs.request import Request, merge, parse_mapping
from mlbench_cli.storage.store import Store
from mlbench_cli.tasks.catalog import Task, short
from mlbench_cli.util.yaml_text import read_yaml

FOLDER = Path(__file__).parents[1] / "campaigns"
_OWN_KEYS = ("title", "runs", "clusters", "metric", "published", "max-hours", "max-cost")


@dataclass(frozen=True)
class Campaign:
    """A campaign file. `entries`: name and complete request of each of its runs. Times in hours, costs in money."""

    name: str
    title: str
    entries: tuple[tuple[str, Request], ...]
    clusters: tuple[str, ...] = ()
    metric: str | None = None
    published: tuple[str, ...] = ()
    max_hours: float | None = None
    max_cost: float | None = None


@dataclass(frozen=True)
class Lot:
    """The runs of one entry on one cluster: one experiment. `entry` is the entry's own name, or its number."""

    entry: str
    request: Request
    cluster: Cluster
    candidates: tuple[Candidate, ...]

    @property
    def name(self) -> str:
        """The name of the experiment."""
        return str(self.request.name)


# --- reading --------------------------------------------------------------------------------------------------------


def campaign_of(command_line: Sequence[str]) -> str | None:
    """The name of the campaign's file in the command line that started a run; None for another command."""
    command, *words = [str(word) for word in command_line[1:] if not str(word).startswith("-")] or [""]
    if command != "campaign" or not words:
        return None
    # The value of an option may stand before the file.
    known = (word for word in words if word.endswith((".yaml", ".yml")) or word in list_shipped())
    return Path(next(known, words[0])).stem[:80]


def list_shipped() -> list[str]:
    """Names of the campaign files that come with mlbench."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def asks_for_several(text: str) -> bool:
    """Whether `text` names a file with `runs`, or one that is shipped. A file that cannot be read asks for nothing."""
    path = Path(text)
    if not path.is_file():
        return text in list_shipped()
    try:
        data = read_yaml(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, UsageError):
        return False
    return isinstance(data, dict) and "runs" in data


def find_file(text: str) -> Path:
    """The campaign file of that path, or the shipped one of that name. Raises NotFoundError."""
    path = Path(text)
    if path.is_file():
        return path
    shipped = FOLDER / f"{text}.yaml"
    if text in list_shipped():
        return shipped
    raise NotFoundError(
        f"There is no file {text}.{did_you_mean(text, list_shipped())}",
        hint=f"Give a path, or one of the files that come with mlbench: {', '.join(list_shipped())}",
    )


def read_campaign(path: Path) -> Campaign:
    """Raises UsageError that names file and key."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"The file {path} cannot be read: {error}.") from None
    try:
        return parse_campaign(text, path.stem)
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}", hint=error.hint, details=error.details) from None


def parse_campaign(text: str, default_name: str) -> Campaign:
    """The campaign in the text of a file. Raises UsageError that names the key."""
    data = read_yaml(text)
    if not isinstance(data, dict):
        raise UsageError("The file is not a mapping.")
    own = {str(key): value for key, value in data.items() if str(key).replace("_", "-") in _OWN_KEYS}
    own = {key.replace("_", "-"): value for key, value in own.items()}
    common = parse_mapping({key: value for key, value in data.items() if str(key).replace("_", "-") not in _OWN_KEYS})
    name = common.name or default_name
    entries = own.get("runs", [{}])
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise UsageError(f'"runs" is {short(entries)}, not a list of mappings of options to values.')
    found = tuple(_entry(number, entry, common, name, len(entries)) for number, entry in enumerate(entries, 1))
    if len({entry for entry, _ in found}) < len(found):
        raise UsageError("Two entries of runs have the same name.", hint='Give each its own "name".')
    title = own.get("title", name)
    metric = own.get("metric")
    if not isinstance(title, str) or not isinstance(metric, str | None):
        raise UsageError('"title" and "metric" must be texts.')
    return Campaign(
        name=name,
        title=title,
        entries=found,
        clusters=_texts(own, "clusters"),
        metric=metric,
        published=_texts(own, "published"),
        max_hours=_limit(own, "max-hours"),
        max_cost=_limit(own, "max-cost"),
    )


def _entry(number: int, entry: Mapping[Any, Any], common: Request, name: str, count: int) -> tuple[str, Request]:
    try:
        own = parse_mapping(entry)
    except UsageError as error:
        raise UsageError(f"Entry {number} of runs: {error.message}", hint=error.hint) from None
    request = merge(replace(common, name=None), own)
    if request.cluster is not None:
        raise UsageError('Name the clusters once, at the top of the file: "clusters: [NAME, NAME]".')
    suffix = own.name or (f"{number}" if count > 1 else "")
    return suffix or name, replace(request, name=f"{name}-{suffix}" if suffix else name)


def _texts(own: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = own.get(key, [])
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise UsageError(f'"{key}" is {short(value)}, not a list of texts.')
    return tuple(value)


def _limit(own: Mapping[str, Any], key: str) -> float | None:
    value = own.get(key)
    if value is None:
        return None
    if not is_finite_number(value) or value <= 0:
        raise UsageError(f'"{key}" is {short(value)}, not a number above 0.')
    return float(value)


# --- from a campaign to runs ----------------------------------------------------------------------------------------


def make_lots(
    campaign: Campaign,
    clusters: Sequence[Cluster],
    machine: Machine | None = None,
    tasks: Mapping[str, Task] | None = None,
    most: int = MAX_MEMBERS,
) -> tuple[Lot, ...]:
    """The experiments of the campaign on `clusters`.

    Raises UsageError for runs that cannot work, and for more than `most` of them.
    """
    lots = []
    for entry, request in campaign.entries:
        for cluster in clusters:
            own = request
            if len(clusters) > 1:
                own = replace(request, name=f"{request.name}-{cluster.name}")
            if cluster.provider != "local":
                own = replace(own, cluster=cluster.name)
            lots.append(Lot(entry, own, cluster, expand(own, cluster, machine, tasks, most=most)))
    count = sum(len(lot.candidates) for lot in lots)
    if count > most:
        raise UsageError(f"The file has {count} runs, more than {most}.", hint=hint_for(count))
    return tuple(lots)


def interleave(lots: Sequence[Lot]) -> Iterator[tuple[Lot, Candidate]]:
    """All runs, so that what a machine does over hours meets all settings alike: the first repeat of everything, then
    the second, and so on; within a repeat one run of each lot in turn."""
    repeats = max((lot.request.repeat or 1 for lot in lots), default=0)
    for repeat in range(repeats):
        rounds = [_of_repeat(lot, repeat) for lot in lots]
        for at in range(max((len(candidates) for candidates in rounds), default=0)):
            for lot, candidates in zip(lots, rounds, strict=True):
                if at < len(candidates):
                    yield lot, candidates[at]


def _of_repeat(lot: Lot, repeat: int) -> Sequence[Candidate]:
    repeats = lot.request.repeat or 1
    if repeat >= repeats:
        return ()
    size = len(lot.candidates) // repeats
    return lot.candidates[repeat * size : (repeat + 1) * size]


def settings_of(lot: Lot, candidate: Candidate, lots: Sequence[Lot]) -> dict[str, str]:
    """What sets the row of a run apart: task, entry and cluster if there are several, values of the matrix."""
    spec = candidate.spec
    settings = {"task": spec.task}
    if len({other.entry for other in lots}) > len({other.request.task for other in lots}):
        settings["series"] = lot.entry
    if len({other.cluster.name for other in lots}) > 1:
        settings["cluster"] = lot.cluster.name
    point = {key.removeprefix("set."): value for key, value in candidate.point.items() if key != "seed"}
    return {**settings, **point}


# --- how long and how much ------------------------------------------------------------------------------------------


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
    """What is left of a campaign: runs in all and left, seconds and price of those that are known, and how many are
    not. `ceiling` is the time that the deadlines of all runs left add up to, in seconds."""

    runs: int
    left: int
    seconds: float
    price: float | None
    unknown: int
    ceiling: float


def forecast(entries: Sequence[tuple[RunSpec, Cluster]], total: int, history: History) -> Forecast:
    """What the runs in `entries` will take, of `total` runs of the campaign."""
    found = [history.estimate(spec, cluster) for spec, cluster in entries]
    prices = [one.price for one in found if one.seconds is not None]
    return Forecast(
        runs=total,
        left=len(found),
        seconds=sum(one.seconds or 0.0 for one in found),
        price=None if any(price is None for price in prices) else sum(price or 0.0 for price in prices),
        unknown=sum(one.seconds is None for one in found),
        ceiling=sum(spec.timeout for spec, _ in entries),
    )


@dataclass
class Budget:
    """What a campaign may still spend. `spent_*` grow with every run that this client waits for."""

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
