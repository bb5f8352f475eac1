"""Results of a site: repeats of one setting form a claim, and comparable claims form a contest."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from mlbench_cli.results.analysis.comparability import ComparisonKey
from mlbench_cli.results.analysis.jobs import Job, split_jobs
from mlbench_cli.results.analysis.numbers import SAMPLES_PER_SECOND, SECONDS, format_estimate, unit_of
from mlbench_cli.results.analysis.series import Group, Measurement, Point, group_runs
from mlbench_cli.results.analysis.stats import Estimate, estimate
from mlbench_cli.results.site.entries import Entry, Withdrawal
from mlbench_cli.util.text import shorten


@dataclass(frozen=True)
class ReceiptNote:
    """A receipt derived from archives of this site. `original` and `reproduction` are their digests."""

    file: str
    verdict: str  # reproduced, different, cannot_tell
    reason: str
    margin: float
    created: str
    original: tuple[str, ...]
    reproduction: tuple[str, ...]
    signer: str | None


@dataclass(frozen=True)
class Claim:
    """All repeats of one setting with one number of workers.

    id           name of its page: a digest of the setting, unchanged by further repeats
    worker_hour  US dollars per worker and hour for runs without a known price; None: no cost
    withdrawn    reason for withdrawing it with all of its entries
    """

    id: str
    group: Group
    point: Point
    entries: tuple[Entry, ...]
    worker_hour: float | None = None
    withdrawn: tuple[Withdrawal, ...] = ()
    receipts: tuple[ReceiptNote, ...] = ()

    @property
    def task(self) -> str:
        """The task that was run."""
        return self.group.task

    @property
    def facts(self) -> dict[str, str]:
        """The setting as strings."""
        return self.group.facts

    @property
    def machine(self) -> str:
        """The machines of the ranks as a phrase."""
        return self.entries[0].machine

    @property
    def method(self) -> str:
        """The communication method."""
        return self.facts["method"]

    @property
    def network(self) -> str:
        """The requested network; empty for the machines' own."""
        return self.facts["network"]

    @property
    def division(self) -> str:
        """Closed, open or none."""
        return self.facts["division"] or "none"

    @property
    def division_text(self) -> str:
        """ "closed division", "no division"."""
        return f"{'no' if self.division == 'none' else self.division} division"

    @property
    def is_good(self) -> bool:
        """Whether the claim has a value: a run succeeded, and it was not withdrawn."""
        return bool(self.point.good) and not self.withdrawn

    @property
    def value(self) -> Estimate | None:
        """The ranked value: the time, or the metric reached within a time budget."""
        if not self.point.good:
            return None
        return self.point.value if self.group.after_time else self.point.seconds

    @property
    def unit(self) -> str:
        """The unit of `value`."""
        return unit_of(self.group.metric) if self.group.after_time else SECONDS

    @property
    def value_text(self) -> str:
        """The value with its interval, or the outcome of the runs."""
        if not self.point.good:
            return ", ".join(sorted({run.outcome.replace("_", " ") for run in self.point.bad}))
        return format_estimate(self.value, self.unit)

    @property
    def throughput_text(self) -> str:
        """Samples per second with interval."""
        return format_estimate(self.point.throughput, SAMPLES_PER_SECOND) if self.point.good else "–"

    def entries_of(self, runs: Iterable[Measurement]) -> list[Entry]:
        """The entries of some runs, of which several may have one name."""
        sources = {run.source for run in runs}
        return [entry for entry in self.entries if entry.measurement.source in sources]

    @cached_property
    def cost(self) -> Estimate | None:
        """US dollars per run; None if a price is unknown."""
        if not self.point.good:
            return None
        costs = [self._cost_of(entry) for entry in self.entries_of(self.point.good)]
        known = [cost for cost in costs if cost is not None]
        return estimate(known) if any(known) and len(known) == len(costs) else None

    @cached_property
    def energy(self) -> Estimate | None:
        """Joules per run; None unless known for all successful runs."""
        entries = self.entries_of(self.point.good)
        known = [entry.energy.joules for entry in entries if entry.energy]
        return estimate(known) if known and len(known) == len(entries) else None

    @property
    def energy_source(self) -> str:
        """The source of the energy figures."""
        return "; ".join(sorted({entry.energy.label for entry in self.entries if entry.energy}))

    @property
    def has_list_price(self) -> bool:
        """Whether the cost comes from the cloud's price list, as recorded with the runs."""
        return all(entry.price is not None and not entry.has_own_price for entry in self.entries)

    def _cost_of(self, entry: Entry) -> float | None:
        if entry.price is not None:
            return entry.price
        if self.worker_hour is None:
            return None
        return self.worker_hour * self.point.workers * entry.wall_seconds / 3600

    @property
    def signers(self) -> tuple[str, ...]:
        """The signers of the archives; empty unless all archives are signed by signers of the site."""
        names = {entry.signer for entry in self.entries}
        return () if None in names else tuple(sorted(name for name in names if name))

    @property
    def date(self) -> str:
        """The date of the first run."""
        return min(entry.created for entry in self.entries)[:10]

    @property
    def version(self) -> str:
        """The version of mlbench that ran it."""
        return ", ".join(sorted({entry.mlbench for entry in self.entries}))

    @property
    def title(self) -> str:
        """A short title: "digits_resnet (tiny), bsp, 2 workers"."""
        preset = "" if self.facts["preset"] in ("spec", "custom") else f" ({self.facts['preset']})"
        words = [f"{self.task}{preset}", self.method, f"{self.point.workers} worker{'s' * (self.point.workers > 1)}"]
        return ", ".join(filter(None, [*words, self.network]))

    @property
    def counted(self) -> str:
        """The number of runs, and of successful ones if some failed."""
        total = len(self.point.good) + len(self.point.bad)
        return str(total) if not self.point.bad else f"{len(self.point.good)} of {total}"

    def to_dict(self) -> dict[str, object]:
        """The claim for index.json, which is for programs."""
        value, cost = self.value, self.cost
        return {
            "id": self.id,
            "page": f"results/{self.id}.html",
            "task": self.task,
            "preset": self.facts["preset"],
            "goal": self.facts["goal"] or None,
            "division": self.division,
            "machine": self.machine,
            "submitter_says": self.entries[0].said.get("hardware") or None,  # which nothing proves
            "method": self.method,
            "network": self.network or None,
            "workers": self.point.workers,
            "value": None if value is None else value.mean,
            "low": None if value is None else value.low,
            "high": None if value is None else value.high,
            "unit": self.unit if not self.group.after_time else self.group.metric,
            "runs": len(self.point.good),
            "failed_runs": len(self.point.bad),
            "cost_usd": None if cost is None else cost.mean,
            "cost_is_list_price": None if cost is None else self.has_list_price,
            "energy_joules": None if self.energy is None else self.energy.mean,
            "energy_source": self.energy_source or None,
            "conditions": list(self.point.labels),
            "signers": list(self.signers),
            "date": self.date,
            "mlbench": self.version,
            "status": "withdrawn" if self.withdrawn else "stands",
            "receipts": [note.file for note in self.receipts],
            "archives": [
                {
                    "file": entry.file,
                    "digest": entry.digest,
                    "sha256": entry.sha256,
                    "bytes": entry.size,
                    "seed": entry.seed,
                    "signer": entry.signer,
                }
                for entry in self.entries
            ],
        }


@dataclass(frozen=True)
class Contest:
    """Claims of the same job, which can be compared; the best first."""

    name: str
    job: Job
    claims: tuple[Claim, ...]

    @cached_property
    def key(self) -> str:
        """Its key in file names."""
        return hashlib.sha256(self.name.encode()).hexdigest()[:8]

    @property
    def title(self) -> str:
        """The name, with the preset if needed."""
        preset = self.job.groups[0].facts["preset"]
        return (
            self.name
            if preset in (*self.name.replace("(", " ").replace(",", " ").split(), "spec", "custom")
            else f"{self.name} ({preset})"
        )

    @cached_property
    def good(self) -> tuple[Claim, ...]:
        """The claims with a value."""
        return tuple(claim for claim in self.claims if claim.is_good)

    @property
    def fastest(self) -> Claim | None:
        """The best claim of the contest."""
        return self.good[0] if self.good else None

    @cached_property
    def cheapest(self) -> Claim | None:
        """The claim with the lowest known cost."""
        known = [claim for claim in self.good if claim.cost is not None]
        return min(known, key=lambda each: (each.point.is_partial, each.cost.mean if each.cost else 0.0), default=None)


def make_contests(
    entries: Sequence[Entry], withdrawn: Sequence[Withdrawal] = (), worker_hour: float | None = None
) -> list[Contest]:
    """The contests of all entries, each of another run, by task."""
    named = {each.digest: each for each in withdrawn}
    # A claim is withdrawn as a whole: removing its slowest repeats would improve it.
    sets = {_repeats_of(entry): named[entry.digest] for entry in entries if entry.digest in named}
    gone = {entry.digest: sets[where] for entry in entries if (where := _repeats_of(entry)) in sets}
    contests: dict[str, Contest] = {}
    for is_withdrawn in (False, True):
        own = [entry for entry in entries if (entry.digest in gone) is is_withdrawn]
        for job in _split(own):
            claims = [_mark(claim, gone) for claim in _claims(job, own, worker_hour)]
            known = contests.get(job.name)
            together = [*(known.claims if known else ()), *claims]
            contests[job.name] = Contest(job.name, known.job if known else job, _rank(together))
    return sorted(contests.values(), key=lambda contest: (contest.job.task, contest.name))


def _repeats_of(entry: Entry) -> tuple[str, ComparisonKey, int]:
    """The key of a claim's repeats: folder, setting and number of workers."""
    return entry.place, entry.measurement.key, entry.measurement.workers


def _split(entries: Sequence[Entry]) -> list[Job]:
    """The jobs of entries. Their groups may hold the runs of several folders: `_claims` keeps these apart."""
    return split_jobs(group_runs(entry.measurement for entry in entries))


def _claims(job: Job, entries: Sequence[Entry], worker_hour: float | None) -> Iterator[Claim]:
    by_source = {entry.measurement.source: entry for entry in entries}
    for group in job.groups:
        for point in group.points:
            places: dict[str, list[Entry]] = {}
            for run in (*point.good, *point.bad):
                places.setdefault(by_source[run.source].place, []).append(by_source[run.source])
            for place, own in places.items():
                kept = {entry.measurement.source for entry in own}
                good, bad = (tuple(run for run in runs if run.source in kept) for runs in (point.good, point.bad))
                identity = _identify(group.facts, point.workers, place if len(places) > 1 else "")
                yield Claim(identity, group, Point(point.workers, good, bad), tuple(own), worker_hour)


def _identify(facts: Mapping[str, str], workers: int, place: str) -> str:
    text = json.dumps([sorted(facts.items()), workers, *([place] if place else [])])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _mark(claim: Claim, gone: Mapping[str, Withdrawal]) -> Claim:
    found = tuple(gone[entry.digest] for entry in claim.entries if entry.digest in gone)
    # Valid and withdrawn runs must have different pages.
    return replace(claim, id=f"{claim.id}-withdrawn", withdrawn=found) if found else claim


def _rank(claims: Iterable[Claim]) -> tuple[Claim, ...]:
    """Claims all of whose runs reached the goal first: of the others only the luckier runs have a time."""

    def place(claim: Claim) -> tuple[int, float, str]:
        if claim.value is None:
            return 2, 0.0, claim.id
        rank = 3 if claim.withdrawn else int(claim.point.is_partial)
        return rank, claim.group.order(claim.point), claim.id

    return tuple(sorted(claims, key=place))


def attach_receipts(contests: Sequence[Contest], notes: Sequence[ReceiptNote]) -> list[Contest]:
    """The contests with receipts attached to their claims."""

    def add(claim: Claim) -> Claim:
        own = {entry.digest for entry in claim.entries}
        found = tuple(note for note in notes if own & {*note.original, *note.reproduction})
        return replace(claim, receipts=found) if found else claim

    return [replace(contest, claims=tuple(map(add, contest.claims))) for contest in contests]


def describe_setting(claim: Claim) -> list[tuple[str, str]]:
    """The setting as rows of informative facts."""
    return [(name, shorten(value, 300)) for name, value in claim.facts.items() if value]
