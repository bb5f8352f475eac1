"""Copies a container's log into a file, and resumes exactly after any interruption.

The server can resume from a second only, and gives the lines whose time stamp is not before it. Of the lines already
copied as many have such a time stamp as the state says; they are a beginning of what comes, so exactly that many are
skipped. No line is lost or doubled, also if several share a time stamp or the two output streams are out of order.
"""

import contextlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlbench_cli.engines.base import LOG_GAP
from mlbench_cli.kube.api import Api
from mlbench_cli.model.run import Finding
from mlbench_cli.storage.run_folder import LOG_TIMES, STATE_FOLDER
from mlbench_cli.util.files import read_end

if TYPE_CHECKING:
    import urllib3

GAPS_LISTED = 100  # workers that evidence names at most
MARKER = b"@mlbench-worker {"  # prefix of worker.sh's first and final messages
SAMPLE = b"@mlbench-sample {"  # and its samples of resources
SAVE_SECONDS = 0.5
SILENT_SECONDS = 60.0  # a silent follow is reopened after this time
DISORDER = timedelta(seconds=0.5)  # by how much time stamps of stdout and stderr may be out of order
CHUNK = 1 << 18
SECOND = 19  # length of "2026-01-02T03:04:05"


class LogGap(Exception):
    """The server no longer has the lines copied earlier (the log was rotated)."""


class LogRefused(Exception):
    """The node answered with words of its own instead of the rest of the log, with status 200."""


@dataclass
class Position:
    """How far a log is copied. `counts`: lines by the second of their time stamp, for the last few seconds."""

    offset: int = 0  # of the local file; data after it are copied again
    pod: str = ""  # uid
    last: str = ""  # time stamp of the last line
    newest: str = ""  # the greatest time stamp, from which to resume
    counts: dict[str, int] = field(default_factory=dict)
    complete: bool = False
    begun: bool = False  # worker.sh has said that the log begins
    gaps: list[int] = field(default_factory=list)  # offsets before which lines are missing
    refusal: str = ""  # why the node could not give the rest, in its words
    sampled: int = 0  # bytes of the file of samples
    timed: int = 0  # bytes of the file of times
    summary: dict[str, Any] | None = None  # what worker.sh said at its end


class LogFile:
    """The local copy of one worker's log: `logs/rank-N.log` in the run's folder, its position in `.state/`.

    N is the worker's first rank. What worker.sh has put into the log is taken out again.
    """

    def __init__(self, folder: Path, worker: int, rank: int) -> None:
        self.worker = worker
        self.rank = rank
        self.path = folder / "logs" / f"rank-{rank}.log"
        self.state = position_file(folder, rank)
        self.position = read_position(self.state) or Position()
        self._saved = 0.0
        for path in (self.path, self.state):
            path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "ab")  # noqa: SIM115
        self._samples = open(samples_file(folder, rank), "ab")  # noqa: SIM115
        self._times = open(times_file(folder, rank), "ab")  # noqa: SIM115
        position = self.position
        copied = ((self._file, position.offset), (self._samples, position.sampled), (self._times, position.timed))
        if any(file.tell() < size for file, size in copied):
            self.position = Position()  # the copy was removed: start from the beginning
        self._file.truncate(self.position.offset)
        self._samples.truncate(self.position.sampled)
        self._times.truncate(self.position.timed)

    def close(self) -> None:
        """Close the files. Call `save` before, or the last position is lost."""
        self._file.close()
        self._samples.close()
        self._times.close()

    def save(self, force: bool = True) -> None:
        """Write lines and position to disk, atomically; without `force` at most once in SAVE_SECONDS."""
        if not force and time.monotonic() < self._saved + SAVE_SECONDS:
            return
        self._file.flush()
        self._samples.flush()
        self._times.flush()
        self._saved = time.monotonic()
        temporary = self.state.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(asdict(self.position)), "utf-8")
        os.replace(temporary, self.state)

    def finish(self) -> None:
        """The log is complete. On disk when this returns."""
        if not self.position.complete:
            self._note_size()
        self._complete()

    def _complete(self) -> None:
        self.position.complete = True
        self._file.flush()
        os.fsync(self._file.fileno())
        self.save()

    def replace(self, part: Path, truncated: bool, summary: dict[str, Any]) -> None:
        """Take the file `part` for the whole log, which is complete with it. On disk when this returns."""
        self._note_size()  # of what was copied: when the rest was written is not known
        size = part.stat().st_size
        self._file.close()
        os.replace(part, self.path)
        self._file = open(self.path, "ab")  # noqa: SIM115
        position = self.position
        position.offset, position.begun, position.gaps = size, True, [size] if truncated else []
        position.summary = summary or position.summary
        self._complete()

    def start(self, pod: str) -> None:
        """Read from this pod from now on; a new pod has a new log, which is appended."""
        position = self.position
        if position.pod != pod:
            position.pod, position.last, position.newest, position.counts = pod, "", "", {}

    def resume(self, exact: bool) -> tuple[str | None, int, str]:
        """From which second to read, how many lines to skip there, and up to which time stamp (not `exact` only)."""
        position = self.position
        if not position.last:
            return None, 0, ""
        second, zone = position.newest[:SECOND], position.newest[SECOND:].lstrip(".0123456789")
        if exact:
            fraction = position.newest[SECOND:].removesuffix(zone) or ".0"
            moment = datetime.fromisoformat(second + fraction[:7]) - DISORDER
            second = moment.isoformat(timespec="seconds")
        skip = sum(count for key, count in position.counts.items() if key >= second)
        return second + zone, skip if exact else 0, "" if exact else position.newest

    def take(self, stamp: str, text: bytes, end: bytes = b"\n") -> None:
        """Append one line."""
        position = self.position
        if position.last and position.last[:SECOND] != stamp[:SECOND]:
            self._note_size()
        if MARKER in text:
            text, end = self._word(text, end)
        elif SAMPLE in text:
            text, end = self._sample(text, end)
        if text or end:
            self._file.write(text + end)
            position.offset += len(text) + len(end)
        second = stamp[:SECOND]
        if second not in position.counts and len(position.counts) > 3:
            for key in sorted(position.counts)[:-3]:
                del position.counts[key]
        position.counts[second] = position.counts.get(second, 0) + 1
        position.last = stamp
        position.newest = max(position.newest, stamp)

    def _note_size(self) -> None:
        """Note how long the log was when its last line was written: once a second, as the local engine does."""
        position = self.position
        time = _parse_stamp(position.last)
        if time is None:
            return
        row = {"time": time, "kind": "log", "rank": self.rank, "log_bytes": position.offset}
        line = json.dumps(row, separators=(",", ":")).encode() + b"\n"
        self._times.write(line)
        position.timed += len(line)

    def note_gap(self) -> None:
        """Lines are missing before the next one."""
        if self.position.offset not in self.position.gaps:
            self.position.gaps.append(self.position.offset)

    def _word(self, text: bytes, end: bytes) -> tuple[bytes, bytes]:
        """Extract the worker's first or final message; text before it is an unfinished line of the task."""
        own, said = self._parse_marked(text, MARKER)
        if said is None or not ("exit_code" in said or "began" in said):
            return text, end
        if "began" in said:
            self.position.begun = True
            return own, b""
        self.position.summary = said
        if said.get("told_begin") and not self.position.begun and 0 not in self.position.gaps:
            self.position.gaps.insert(0, 0)  # the first lines were deleted before they were copied
        return own, b""

    def _sample(self, text: bytes, end: bytes) -> tuple[bytes, bytes]:
        own, said = self._parse_marked(text, SAMPLE)
        if said is None or not isinstance(said.get("sample"), dict):
            return text, end
        line = json.dumps(said["sample"], separators=(",", ":")).encode() + b"\n"
        self._samples.write(line)
        self.position.sampled += len(line)
        return own, b""

    def _parse_marked(self, text: bytes, marker: bytes) -> tuple[bytes, dict[str, object] | None]:
        """What is before the marker, and the object behind it, if it is this worker's."""
        own, _, said = text.rpartition(marker)
        try:
            document = json.loads(b"{" + said)
        except ValueError:
            return text, None
        ours = isinstance(document, dict) and document.get("worker") == self.worker
        return own, document if ours else None


def position_file(folder: Path, rank: int) -> Path:
    """The file that says how far a rank's log was copied."""
    return folder / ".state" / f"log-{rank}.json"


def log_gap(
    gaps: Mapping[int, Sequence[int]],
    ranks: Sequence[int],
    late: Sequence[int] = (),
    refusals: Mapping[int, str] | None = None,
) -> list[Finding]:
    """The finding on the workers of whose logs lines are missing, if any; `ranks[i]` is the first rank of worker i.

    `gaps` are places where lines were lost, `late` the workers whose logs were not copied to their ends in time,
    `refusals` what the nodes said instead of giving them.
    """
    workers = sorted({*gaps, *late})
    if not workers:
        return []
    worker = workers[0]
    others = f" (And of {len(workers) - 1} others.)" if len(workers) > 1 else ""
    refusal = (refusals or {}).get(worker)
    lost = f'the node could not give it: "{refusal}"' if refusal else "the node had already deleted them, or is gone"
    why = lost if worker in gaps else "its last lines did not arrive in time"
    places = {_log_name(ranks[number]): list(gaps[number]) for number in sorted(gaps)[:GAPS_LISTED]}
    unfinished = [_log_name(ranks[number]) for number in late[:GAPS_LISTED]]
    return [
        Finding(
            LOG_GAP,
            f"The log of worker {worker} has gaps: {why}.{others}",
            hint="A node keeps only about the last 10 MiB, and nothing of removed containers: follow runs that write a "
            "lot (mlbench wait), or write less.",
            evidence={"missing_before_byte": places, **({"unfinished": unfinished} if unfinished else {})},
        )
    ]


def _log_name(rank: int) -> str:
    return f"logs/rank-{rank}.log"


def samples_file(folder: Path, rank: int) -> Path:
    """The resource samples in a worker's log, one JSON object a line."""
    return folder / ".state" / f"samples-{rank}.jsonl"


def times_file(folder: Path, rank: int) -> Path:
    """The size of a worker's log over time, by the node's time stamps of its lines; one JSON object a line."""
    return folder / STATE_FOLDER / f"{LOG_TIMES}{rank}.jsonl"


def read_position(path: Path) -> Position | None:
    """How far a log was copied; None if it was not copied or the file is damaged, so copying starts over."""
    try:
        return Position(**json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None


class Copying:
    """One read of a container's log; `stop` ends it from another thread."""

    def __init__(self, api: Api, namespace: str) -> None:
        self._api = api
        self._namespace = namespace
        self._answer: urllib3.BaseHTTPResponse | None = None
        self.stopped = False

    def stop(self) -> None:
        """End the reading from another thread, also while it waits for the server."""
        self.stopped = True
        answer = self._answer
        if answer is not None:
            with contextlib.suppress(ValueError, OSError):
                answer.shutdown()

    def run(self, pod: str, log: LogFile, follow: bool) -> None:
        """Copy until the server ends the stream, or the worker has said its last word.

        Raises what a broken connection raises, and ApiError.
        """
        try:
            self._copy(pod, log, follow, exact=True)
        except LogGap:
            log.note_gap()
            self._copy(pod, log, follow, exact=False)

    def _copy(self, pod: str, log: LogFile, follow: bool, exact: bool) -> None:
        since, skip, known = log.resume(exact)
        last, newest = log.position.last, log.position.newest
        answer = self._api.stream(
            f"/api/v1/namespaces/{self._namespace}/pods/{pod}/log",
            read_seconds=SILENT_SECONDS,
            container="main",
            timestamps=True,
            follow=follow or None,
            sinceTime=since,
        )
        self._answer = answer
        rest = b""
        try:
            unstamped = b""
            for chunk in answer.stream(CHUNK):
                lines = (rest + chunk).split(b"\n")
                rest = lines.pop()
                for line in lines:
                    stamp, text = _split(line)
                    unstamped = b"" if stamp else text
                    if not stamp or (known and stamp <= known):
                        continue  # the rest of a line from before `since`, or what `unstamped` is for at the end
                    if skip:
                        skip -= 1
                        if stamp > newest or (not skip and stamp != last):
                            raise LogGap
                        continue
                    log.take(stamp, text)
                    if log.position.summary:
                        return
                log.save(force=False)
            if skip and not follow:
                raise LogGap
            stamp, text = _split(rest)
            refusal = (text if rest and not stamp else b"" if stamp else unstamped).strip()
            if refusal and not self.stopped:
                raise LogRefused(refusal.decode("utf-8", "replace"))
            if stamp and not follow and not skip and not (known and stamp <= known):
                log.take(stamp, text, b"")
        finally:
            self._answer = None
            answer.close()
            log.save()


def last_lines(path: Path, count: int = 40) -> str:
    """The end of a log, as text."""
    return "\n".join(read_end(path).decode("utf-8", "replace").splitlines()[-count:])


def without_stamps(text: str) -> str:
    """The lines of a log that was asked for with time stamps; what the node itself says has none, and is left out."""
    lines = [_split(line.encode()) for line in text.split("\n")]
    return "\n".join(line.decode("utf-8", "replace") for stamp, line in lines if stamp)


def _split(line: bytes) -> tuple[str, bytes]:
    """Time stamp (UTC, of fixed width, so that it can be compared as text) and text; no stamp if the line has none."""
    stamp, _, text = line.partition(b" ")
    if len(stamp) < 20 or stamp[10:11] != b"T" or not stamp[:4].isdigit():
        return "", line
    moment = stamp.decode("ascii", "replace")
    if moment.endswith("Z"):
        return moment, text
    zone = moment[SECOND:].lstrip(".0123456789")
    try:
        second = datetime.fromisoformat(moment[:SECOND] + zone).astimezone(UTC)
    except ValueError:
        return "", line
    return f"{second:%Y-%m-%dT%H:%M:%S}{moment[SECOND:].removesuffix(zone)}Z", text


def _parse_stamp(stamp: str) -> float | None:
    """A time stamp of the node in seconds since 1970; None if it is none."""
    try:
        return datetime.fromisoformat(stamp).timestamp()
    except (ValueError, OverflowError):
        return None
