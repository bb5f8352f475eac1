"""Fault injection: the script as people write it, and the plan that follows from script and seed.

    at 120s kill rank 3                         every ~600s kill any rank
    at 60s for 20s stop rank 1                  at 60s for 60s slow rank 2 to 50% cpu
    at 90s for 20s link 2 down                  at 90s for 60s link 2 10mbit         at 90s link any loss 2%
    seed 7                                      anyway

Items are separated by semicolons or newlines. Times count from the first update of the training. `every 600s` is a
fixed interval, `every ~600s` draws exponential intervals with that mean. The plan is a pure function of script, seed
and number of ranks, so it is known before the start and can be re-derived from an archive. `anyway` starts a run even
if faults are predicted to come faster than its checkpoints. Agents on machines with Python 3.9 or later read this
module, too.
"""

from __future__ import annotations

import heapq
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mlbench_cli.errors import NotFoundError, UsageError, did_you_mean
from mlbench_cli.model.network import NetworkShape, parse_network

try:
    from enum import StrEnum
except ImportError:  # before Python 3.11
    from enum import Enum

    class StrEnum(str, Enum):  # type: ignore[no-redef]  # noqa: UP042
        """As in Python 3.11."""

        __str__ = str.__str__


MIN_INTERVAL = 0.05  # seconds between repeated faults
MAX_SECONDS = 30 * 86400.0
MAX_TEXT = 64 << 10
MAX_ITEMS = 1000


class FaultKind(StrEnum):
    """The kinds of fault that can be injected into a rank or a link."""

    KILL = "kill"
    STOP = "stop"
    SLOW = "slow"
    LINK = "link"

    @property
    def targets_worker(self) -> bool:
        """Whether its target is a worker (its link) instead of a rank."""
        return self is FaultKind.LINK

    @property
    def lasts(self) -> bool:
        """Whether it can end, which restores the previous state."""
        return self is not FaultKind.KILL


class Policy(StrEnum):
    """What happens when a rank fails."""

    FAIL = "fail"  # the run ends
    RESTART = "restart"  # all ranks start again from the last checkpoint


class Fault(NamedTuple):
    """One fault of a plan. `at` and `seconds` (None: to the end) in seconds, from the first update of the training.

    target   rank, or worker for links; None: any
    share    of a CPU that a slowed rank keeps, or of packets that a lossy link drops
    rate     of a slowed link, bits per second (0: the link is down)
    """

    kind: str
    at: float
    target: int | None = None
    seconds: float | None = None
    share: float | None = None
    rate: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """The fault as plain values; unset fields are left out."""
        return {key: value for key, value in self._asdict().items() if value is not None}

    def __str__(self) -> str:
        """ "kill rank 3", "link 2 down for 20 s"."""
        words = _action_words(FaultKind(self.kind), str(self.target), self.share, self.rate)
        return words if self.seconds is None else f"{words} for {self.seconds:g} s"


class Item(NamedTuple):
    """One line of a script. `every` is None for a fault that happens once; `target` None stands for any."""

    kind: FaultKind
    at: float | None
    every: float | None
    is_random: bool
    target: int | None
    seconds: float | None
    share: float | None = None
    rate: float | None = None

    def __str__(self) -> str:
        when = f"at {_time(self.at or 0)}" if self.every is None else f"every {'~' * self.is_random}{_time(self.every)}"
        lasting = "" if self.seconds is None else f" for {_time(self.seconds)}"
        target = "any" if self.target is None else str(self.target)
        return f"{when}{lasting} {_action_words(self.kind, target, self.share, self.rate)}"


def _action_words(kind: FaultKind, target: str, share: float | None, rate: float | None) -> str:
    """What is done to whom, as scripts say it; `target` is a number or "any"."""
    rank = "any rank" if target == "any" else f"rank {target}"
    link = f"loss {100 * share:g}%" if share is not None else str(NetworkShape(rate)) if rate else "down"
    return {
        FaultKind.KILL: f"kill {rank}",
        FaultKind.STOP: f"stop {rank}",
        FaultKind.SLOW: f"slow {rank} to {100 * (share or 0):g}% cpu",
        FaultKind.LINK: f"link {target} {link}",
    }[kind]


class FaultScript(NamedTuple):
    """A parsed script. `seed` is None if the run's seed is used."""

    items: tuple[Item, ...]
    seed: int | None = None
    is_forced: bool = False

    def __str__(self) -> str:
        """The canonical text, which parses to the same script."""
        words = [str(item) for item in self.items]
        words += [] if self.seed is None else [f"seed {self.seed}"]
        return "; ".join([*words, *(["anyway"] if self.is_forced else [])])

    @property
    def mtbf(self) -> float | None:
        """Mean seconds between repeated faults that end a rank; None without such faults."""
        rates = [1 / item.every for item in self.items if item.every and not (item.kind.lasts and item.seconds)]
        return 1 / sum(rates) if rates else None

    @property
    def kinds(self) -> set[FaultKind]:
        """The kinds of fault in it."""
        return {item.kind for item in self.items}

    def plan(self, seed: int, ranks: int, workers: int) -> Iterator[Fault]:
        """All faults in the order of their times; endless if one repeats."""
        seed = seed if self.seed is None else self.seed
        streams = (
            _stream(item, random.Random(f"{seed}/{number}"), ranks, workers) for number, item in enumerate(self.items)
        )
        return heapq.merge(*streams, key=lambda fault: fault.at)

    def check(self, ranks: int, workers: int) -> None:
        """Raise UsageError for a rank or link that a run of this size does not have."""
        for item in self.items:
            count = workers if item.kind.targets_worker else ranks
            if item.target is not None and item.target >= count:
                what = "link" if item.kind is FaultKind.LINK else "rank"
                raise UsageError(
                    f'--faults "{item}": there is no {what} {item.target}; the run has {count}, from 0 to {count - 1}.',
                    hint=f"For example {what} {count - 1}, or {what} any."
                    if item.kind.targets_worker
                    else f"For example rank {count - 1}, or any rank.",
                )


def read_faults(text: str) -> FaultScript:
    """The script in a file or in the text itself. Raises UsageError that quotes the bad item."""
    if "\n" not in text and " " not in text.strip() and text.strip() not in ("", "anyway"):
        path = Path(text.strip())
        try:
            with open(path, encoding="utf-8") as file:
                text = file.read(MAX_TEXT + 1)
        except FileNotFoundError:
            raise NotFoundError(
                f"--faults: there is no file {path}.", hint="A script has blanks: --faults 'at 60s kill rank 1'"
            ) from None
        except (OSError, UnicodeDecodeError, ValueError) as error:
            raise UsageError(f"--faults: {path} cannot be read: {error}.") from None
    return parse_faults(text)


def parse_faults(text: str) -> FaultScript:
    """The script in a text. Raises UsageError that quotes the bad item."""
    if len(text) > MAX_TEXT:
        raise UsageError(f"--faults: the script is longer than {MAX_TEXT >> 10} KiB.")
    script = FaultScript(())
    for line in text.splitlines():
        for part in line.partition("#")[0].split(";"):
            words = part.lower().split()
            if words:
                script = _add(script, words, " ".join(part.split()))
    if not script.items:
        raise UsageError("--faults: the script holds no fault.", hint="--faults 'at 60s kill rank 1'")
    return script


def _add(script: FaultScript, words: list[str], shown: str) -> FaultScript:
    if words == ["anyway"]:
        return script._replace(is_forced=True)
    if words[0] == "seed":
        if len(words) != 2 or not words[1].isdecimal() or int(words[1]) >= 1 << 32:
            raise _error(shown, "a seed is one number from 0 to 4294967295", "seed 7")
        return script._replace(seed=int(words[1]))
    if len(script.items) >= MAX_ITEMS:
        raise UsageError(f"--faults: the script has more than {MAX_ITEMS} faults.")
    return script._replace(items=(*script.items, _parse_item(words, shown)))


def _parse_item(words: list[str], shown: str) -> Item:
    at = every = seconds = None
    is_random = False
    while words and words[0] in ("at", "every", "for"):
        word, value, *words = (*words, "") if len(words) == 1 else words
        if word == "at":
            at = _parse_time(value, shown)
        elif word == "for":
            seconds = _parse_time(value, shown)
            if not seconds:
                raise _error(shown, "it lasts 0 seconds", "at 60s for 20s stop rank 1")
        else:
            is_random = value.startswith("~")
            every = _parse_time(value.removeprefix("~"), shown)
            if every < MIN_INTERVAL:
                raise _error(shown, f"the interval is below {MIN_INTERVAL} s", "every ~600s kill any rank")
    if (at is None) == (every is None):
        problem = "it says neither when nor how often" if at is None else "it has both a moment and an interval"
        raise _error(shown, problem, "at 60s kill rank 1, or every ~600s kill any rank")
    item = _parse_action(words, shown)
    if seconds is not None and not item.kind.lasts:
        raise _error(shown, "a killed rank does not come back by itself", "at 60s kill rank 1")
    return item._replace(at=at, every=every, is_random=is_random, seconds=seconds)


_EXAMPLES = {
    "kill": "at 60s kill rank 1",
    "stop": "at 60s for 20s stop rank 1",
    "slow": "at 60s for 60s slow rank 2 to 50% cpu",
    "link": "at 90s for 20s link 2 down, or link 2 10mbit, or link 2 loss 2%",
}

# Faults that users may look for, and why they cannot be injected.
_IMPOSSIBLE = {
    "pod": "a pod has no permission to delete another one",
    "job": "a requeued job starts from the beginning as another run",
    "node": "the loss of a machine ends the run",
    "disk": "mlbench does not fill disks",
}


def _parse_action(words: list[str], shown: str) -> Item:
    verb = words[0] if words else ""
    if reason := _IMPOSSIBLE.get(verb) or _IMPOSSIBLE.get(" ".join(words[:2])):
        raise _error(shown, reason, "at 60s kill rank 1")
    if verb not in _EXAMPLES:
        near = did_you_mean(verb, list(_EXAMPLES)) if verb else ""
        problem = f'"{verb}" is not one of {", ".join(_EXAMPLES)}' if verb else "it does not say what happens"
        raise _error(shown, problem + (f".{near}".rstrip(".?") + "?" if near else ""), "at 60s kill rank 1")
    example, rest = _EXAMPLES[verb], words[1:]
    make = Item(FaultKind(verb), None, None, False, None, None)
    if verb in ("kill", "stop", "slow"):
        target, rest = _parse_rank(rest, shown, example)
        make = make._replace(target=target)
        if verb == "slow":
            return make._replace(share=_parse_slow(rest, shown, example))
        if rest:
            raise _error(shown, f'"{" ".join(rest)}" is not understood', example)
        return make
    if len(rest) < 2 or not (rest[0] == "any" or rest[0].isdecimal()):
        raise _error(shown, f"it names no {verb}", example)
    make = make._replace(target=None if rest[0] == "any" else int(rest[0][:9]))
    return _parse_link(make, rest[1:], shown, example)


def _parse_rank(words: list[str], shown: str, example: str) -> tuple[int | None, list[str]]:
    if words[:2] == ["any", "rank"]:
        return None, words[2:]
    if len(words) >= 2 and words[0] == "rank" and words[1].isdecimal():
        return int(words[1][:9]), words[2:]
    raise _error(shown, "it names no rank", f"{example}, or any rank")


def _parse_slow(words: list[str], shown: str, example: str) -> float:
    match = re.fullmatch(r"to (\d{1,2}(?:\.\d{1,4})?)% ?cpu", " ".join(words))
    if match is None or not 1 <= float(match[1]) < 100:
        raise _error(shown, "it does not say to how much of its CPU the rank is slowed, from 1% to 99%", example)
    return float(match[1]) / 100


def _parse_link(item: Item, words: list[str], shown: str, example: str) -> Item:
    if words == ["down"]:
        return item._replace(rate=0.0)
    if words[0] == "loss":
        match = re.fullmatch(r"(\d{1,2}(?:\.\d{1,4})?)%", " ".join(words[1:]))
        if match is None or not float(match[1]):
            raise _error(shown, "the loss is a share of packets, above 0% and below 100%", example)
        return item._replace(share=float(match[1]) / 100)
    if len(words) != 1:
        raise _error(shown, f'"{" ".join(words)}" is neither down, nor a rate, nor a loss', example)
    try:
        shape = parse_network(words[0], "the rate")
    except UsageError as error:
        raise _error(shown, error.message.rstrip("."), example) from None
    if shape.delay or shape.is_modeled:
        raise _error(shown, "only the rate of a link can change", example)
    return item._replace(rate=shape.rate)


def _parse_time(text: str, shown: str) -> float:
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?)(s|m|h|)", text)
    seconds = float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]] if match else -1.0
    if not 0 <= seconds <= MAX_SECONDS:
        raise _error(shown, f'"{text}" is not a time', "60s, 5m or 2h")
    return seconds


def _error(shown: str, problem: str, example: str) -> UsageError:
    quoted = shown if len(shown) <= 100 else f"{shown[:99]}…"
    stop = "" if problem.endswith("?") else "."
    return UsageError(f'--faults "{quoted}": {problem}{stop}', hint=f"For example: {example}")


def _stream(item: Item, generator: random.Random, ranks: int, workers: int) -> Iterator[Fault]:
    """The faults of one item. Only random() is used, whose values are the same in every version of Python."""
    count = workers if item.kind.targets_worker else ranks
    moment = 0.0
    while True:
        if item.every is None:
            moment = item.at or 0.0
        else:
            moment += -item.every * math.log(1 - generator.random()) if item.is_random else item.every
        target = item.target
        if target is None:
            target = int(generator.random() * count)
        yield Fault(str(item.kind), round(moment, 3), target, item.seconds, item.share, item.rate)
        if item.every is None:
            return


def _time(seconds: float) -> str:
    return f"{seconds:.10g}s"


def best_interval(checkpoint: float, mtbf: float) -> float:
    """The checkpoint interval in seconds that minimizes lost time: Daly's higher-order estimate from the cost of a
    checkpoint and the mean time between faults (seconds). Source: J. T. Daly, Future Generation Computer Systems 22
    (2006), eq. 37."""
    if checkpoint >= 2 * mtbf:
        return mtbf
    share = checkpoint / (2 * mtbf)
    return math.sqrt(2 * checkpoint * mtbf) * (1 + math.sqrt(share) / 3 + share / 9) - checkpoint


def expected_attempts(mtbf: float, until_checkpoint: float) -> float:
    """Expected number of attempts until one survives for `until_checkpoint` seconds."""
    return math.exp(min(50.0, until_checkpoint / mtbf))


def parse_every(text: str) -> tuple[float | None, int | None]:
    """Seconds or updates between checkpoints: "30s" or "200". Raises UsageError."""
    if text.isdecimal() and text.isascii() and int(text[:9]) > 0 and len(text) < 10:
        return None, int(text)
    match = re.fullmatch(r"(\d{1,7}(?:\.\d{1,3})?)(s|m|h)", text)
    seconds = float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]] if match else 0.0
    if not seconds:
        raise UsageError(
            f'run.checkpoint_every "{text[:40]}" is neither a time nor a number of updates.',
            hint="--set run.checkpoint_every=30s, or --set run.checkpoint_every=200 for every 200 updates",
        )
    return seconds, None
