"""Expected performance of machine types, results below it, and slow links.

Expected figures have three sources: a table that is shipped, the all-reduce that the original MLBench published, and
what a person has recorded from verified archives of a machine that was found to be good.
"""

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

from mlbench_cli.errors import UsageError
from mlbench_cli.model.goals import is_finite_number
from mlbench_cli.model.run import JsonObject
from mlbench_cli.results.analysis import collectives
from mlbench_cli.results.analysis.baseline import figures_of
from mlbench_cli.results.analysis.comparability import key_of
from mlbench_cli.results.analysis.series import drop_duplicates, measure
from mlbench_cli.results.analysis.verdict import Verdict
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.storage.run_folder import NETWORK
from mlbench_cli.util.csv_text import read_table
from mlbench_cli.util.files import write_atomically
from mlbench_cli.util.text import list_some
from mlbench_cli.util.times import now

SHARE = 0.95
FILE = "baselines.json"
PUBLISHED_MACHINE = "gke/n1-standard-4"
_SHIPPED = Path(__file__).with_name("expected_figures.csv")
_RATE = "alone_bits_per_second"
MIN_LINKS = 3
NOTHING_COUNTS = "None of these runs has a valid throughput or bandwidth."


@dataclass(frozen=True)
class Expected:
    """A figure that a machine type is expected to reach with so many workers and ranks.

    `figure` is "throughput" with `task` and `preset`, or a collective's bandwidth, for which these are empty.
    """

    machine: str
    workers: int
    ranks: int
    backend: str
    figure: str
    value: float
    source: str
    task: str = ""
    preset: str = ""

    @property
    def key(self) -> tuple[str, int, int, str, str, str, str]:
        return self.machine, self.workers, self.ranks, self.backend, self.figure, self.task, self.preset


@dataclass(frozen=True)
class SlowLink:
    """A link between neighbors of the ring that carried less than the others when they were measured one by one.

    `share` is its rate over the median of all links.
    """

    sender: int
    receiver: int
    nodes: tuple[str, str]
    bits_per_second: float
    share: float


@dataclass(frozen=True)
class CheckedFigure:
    """A figure of runs compared with its baseline. `share` is measured / expected; None without a baseline."""

    runs: tuple[str, ...]
    expected: Expected | None
    figure: str
    machine: str
    value: float
    share: float | None
    verdict: Verdict
    links: tuple[SlowLink, ...] = ()

    @property
    def suspects(self) -> list[str]:
        """Machines at an end of every slow link, if some machine is at an end of none."""
        ends = [set(link.nodes) for link in self.links]
        return sorted(set.intersection(*ends)) if ends else []

    def to_dict(self) -> JsonObject:
        return {
            "runs": list(self.runs),
            "figure": self.figure,
            "machine": self.machine,
            "value": self.value,
            "expected": None if self.expected is None else asdict(self.expected),
            "share": self.share,
            "verdict": str(self.verdict),
            "suspects": self.suspects,
            "slow_links": [asdict(link) for link in self.links],
        }


# --- what is expected -----------------------------------------------------------------------------------------------


def list_expected(home: Path) -> list[Expected]:
    """All expected figures; what was recorded on this machine comes first. Raises UsageError for a broken file."""
    found: dict[object, Expected] = {}
    for each in (*read_recorded(home), *_load_shipped(), *_find_published()):
        found.setdefault(each.key, each)
    return list(found.values())


def read_recorded(home: Path) -> list[Expected]:
    """What was recorded from archives. Raises UsageError for a file that cannot be read."""
    path = home / FILE
    try:
        rows = json.loads(path.read_bytes())["figures"]
        return [Expected(**row) for row in rows if is_finite_number(row["value"])]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} cannot be read: {error}.", hint="Move the file away and record again.") from None


def record_expected(home: Path, archives: Sequence[Archive]) -> list[Expected]:
    """Record the figures of verified archives as what their machines are expected to reach; means over repeats.

    Figures of the same machine, workers and backend are replaced. Raises UsageError if no archive has one that counts.
    """
    made = [
        replace(place, value=statistics.fmean(values), source=f"recorded {now()[:10]}: {list_some(runs)}")
        for place, values, runs in _measure(archives)
    ]
    if not made:
        raise UsageError(NOTHING_COUNTS, hint="mlbench run NAME 2 --task allreduce")
    known = {each.key: each for each in (*read_recorded(home), *made)}
    document = {"schema_version": 1, "figures": [asdict(each) for each in known.values()]}
    write_atomically(home / FILE, (json.dumps(document, indent=2) + "\n").encode())
    return made


@cache
def _load_shipped() -> tuple[Expected, ...]:
    return tuple(
        Expected(
            *(row["machine"], int(row["workers"]), int(row["ranks"]), row["backend"], row["figure"]),
            *(float(row["value"]), row["source"]),
        )
        for row in read_table(_SHIPPED)
    )


@cache
def _find_published() -> tuple[Expected, ...]:
    """The best bus bandwidth of the original's all-reduces between CPUs, one worker on each machine."""
    found = []
    for curve in collectives.load_published():
        ranks = int(curve.facts["ranks"].split()[0])
        if curve.facts["device"] == "cpu":
            best = max(point[2] for point in curve.points)
            figure = f"{curve.collective} {curve.dtype}, best busbw GB/s"
            source = "original MLBench, release 2020, read off its plots"
            found.append(Expected(PUBLISHED_MACHINE, ranks, ranks, curve.facts["backend"], figure, best, source))
    return tuple(found)


# --- what was measured ----------------------------------------------------------------------------------------------


def check_figures(
    archives: Sequence[Archive], expected: Iterable[Expected], share: float = SHARE
) -> list[CheckedFigure]:
    """Compare verified archives with the baselines of their machines; repeats are averaged.

    For slow runs, the links are examined one by one, in the network probe before the task.
    """
    known = {each.key: each for each in expected}
    by_name = {str(archive.run["name"]): archive for archive in archives}
    checked = []
    for place, values, runs in _measure(archives):
        value = statistics.fmean(values)
        goal = known.get(place.key)
        reached = None if goal is None else value / goal.value
        links: tuple[SlowLink, ...] = ()
        verdict = Verdict.CANNOT_TELL
        if reached is not None:
            verdict = Verdict.PASSED if reached >= share else Verdict.FAILED
        if verdict is Verdict.FAILED:
            links = tuple(link for run in runs for link in find_slow_links(by_name[run], share))
        checked.append(CheckedFigure(runs, goal, place.figure, place.machine, value, reached, verdict, links))
    return checked


def find_slow_links(archive: Archive, share: float = SHARE) -> list[SlowLink]:
    """Links that carried less than `share` of the median of all, each measured alone; none if there are too few."""
    if NETWORK not in archive.names:
        return []
    probes = archive.document(NETWORK).get("probes") or []
    before = [probe for probe in probes if probe.get("stage") == "before"][:1]
    found = [link for probe in before for link in probe.get("links") or []]
    links = [link for link in found if is_finite_number(link.get(_RATE)) and link[_RATE] > 0]
    if len(links) < MIN_LINKS:
        return []
    middle = statistics.median(link[_RATE] for link in links)
    # The node of each rank. On Kubernetes a state is that of a pod, which has all processes of a worker.
    spec = archive.run["spec"]
    each = int(spec["processes_per_worker"]) if spec["engine"] == "kubernetes" else 1
    states = {int(state["rank"]): str(state["node"] or "?") for state in archive.result["worker_states"]}
    nodes = {number * each + process: node for number, node in states.items() for process in range(each)}
    return [
        SlowLink(
            int(link["from"]),
            int(link["to"]),
            (nodes.get(int(link["from"]), "?"), nodes.get(int(link["to"]), "?")),
            float(link[_RATE]),
            link[_RATE] / middle,
        )
        for link in links
        if link[_RATE] < share * middle and {"from", "to"} <= set(link)
    ]


def _measure(archives: Sequence[Archive]) -> Iterator[tuple[Expected, list[float], tuple[str, ...]]]:
    """(what is measured, with no value, the values of repeats, names of their runs); only runs that count."""
    places: dict[object, Expected] = {}
    values: dict[object, list[tuple[str, float]]] = {}
    for archive in drop_duplicates(archives):
        if not measure(archive).good or archive.result["label"]["word"] == "functional":
            continue
        for place, value in _places_of(archive):
            places[place.key] = place
            values.setdefault(place.key, []).append((str(archive.run["name"]), value))
    for key, place in places.items():
        yield place, [value for _, value in values[key]], tuple(name for name, _ in values[key])


def _places_of(archive: Archive) -> Iterator[tuple[Expected, float]]:
    """Throughput and best bandwidths; seconds depend on the goal, and are no matter of machines alone."""
    result, machine = archive.result, name_machine(archive)
    for name, (value, higher_is_better) in figures_of(archive).items():
        is_throughput = name == "throughput"
        if value > 0 and higher_is_better and (is_throughput or name.endswith("busbw GB/s")):
            about = (str(result["task"]), str(result["preset"])) if is_throughput else ("", "")
            size = (int(result["workers"]), int(result["world_size"]))
            yield Expected(machine, *size, str(result["backend"]), name, 0.0, "", *about), value


def name_machine(archive: Archive) -> str:
    """Provider and machine type, "gke/n1-standard-4"; of other machines what their processors say."""
    facts: Mapping[str, str] = key_of(archive).facts()
    kind = str(archive.run["spec"].get("cluster_kind") or "")
    return kind if "/" in kind else facts.get("machine") or kind or "unknown machine"
