"""Follow runs for many browsers: one thread observes a run for all of its followers.

A follower gets everything after its own position: metric points and log lines are numbered, so nothing is sent twice,
and only the beginning of a long log can be lost.
"""

import asyncio
import json
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from html import escape

from mlbench_cli.api import Client, RunHandle
from mlbench_cli.engines.follow import UNREACHABLE, LogReader, Silence
from mlbench_cli.errors import CredentialError, MlbenchError, StoreLockedError, UnreachableError
from mlbench_cli.model.goals import Goal
from mlbench_cli.model.run import JsonObject
from mlbench_cli.results.analysis.tables import MetricPoint
from mlbench_cli.results.archive.evidence import find_events, parse_metric
from mlbench_cli.results.figures.curves import live_charts
from mlbench_cli.results.figures.svg import render_svg
from mlbench_cli.server.access import LOCK_SECONDS
from mlbench_cli.server.config import ServerConfig
from mlbench_cli.server.words import live_words
from mlbench_cli.util.text import clean

POLL_SECONDS = 0.7
IDLE_SECONDS = 20.0  # after which a comment keeps the connection alive
MAX_POINTS = 50_000
MAX_LINES = 2_000
MAX_FOLLOWERS = 200
MAX_RANKS = 32  # whose logs are followed; other logs are read page by page


class TooManyFollowers(MlbenchError):
    """More followers than the server allows."""


@dataclass
class Feed:
    """The state of a followed run. Lists only grow, and deques drop their oldest items."""

    points: list[MetricPoint] = field(default_factory=list)
    lines: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=MAX_LINES))
    line_count: int = 0
    status: JsonObject = field(default_factory=dict)
    resources: JsonObject = field(default_factory=dict)  # by rank, its resource usage
    version: int = 0
    is_over: bool = False
    problem: str | None = None
    curves: str = ""  # of all points, as HTML
    changed: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class News:
    """The news from one observation of a run. `lines` are the last of `line_count` new lines."""

    status: JsonObject
    resources: JsonObject
    points: list[MetricPoint]
    lines: deque[tuple[int, str]]
    line_count: int
    is_over: bool


class Watcher:
    """Observes one run from a thread."""

    def __init__(self, config: ServerConfig, name: str) -> None:
        self._client = Client(config.home, patience=LOCK_SECONDS)
        self._run: RunHandle = self._client.find_run(name)
        self._ranks = range(min(MAX_RANKS, self._run.run.spec.world_size))
        self._log: LogReader | None = None

    def look(self) -> "News":
        """The news since the last observation, in bounded memory."""
        is_over = self._run.is_sealed  # before the logs are read, so that nothing is missed
        points: list[MetricPoint] = []
        lines: deque[tuple[int, str]] = deque(maxlen=MAX_LINES)
        count = 0
        if self._log is None:
            self._log = LogReader(self._run.run, self._client.engine_of(self._run.run), self._ranks)
        for rank in self._ranks:
            for line in self._log.read_new(rank):
                events = [*find_events(line)]
                if not events:
                    count += 1
                    lines.append((rank, clean(line.decode("utf-8", "replace").rstrip("\r\n")[:4000], keep="\r\t")))
                for event in events:
                    metric = parse_metric(event) if event["event"] == "metric" else None
                    point = MetricPoint.parse(self._run.name, self._run.run.spec.workers, metric) if metric else None
                    points += [point] if point else []
        used = {str(rank): facts for rank, facts in latest_resources(self._run).items()}
        return News(self._run.status(), used, points, lines, count, is_over)

    def close(self) -> None:
        """Close its connections."""
        self._client.close()


class Feeds:
    """The feeds of all followed runs."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._feeds: dict[str, tuple[Feed, asyncio.Task[None]]] = {}
        self._followers: dict[str, int] = {}

    def require_room(self) -> None:
        """Raise TooManyFollowers if the limit is reached, before a response has been started."""
        if sum(self._followers.values()) >= MAX_FOLLOWERS:
            raise TooManyFollowers(f"{MAX_FOLLOWERS} pages already follow runs.", hint="Close some of them.")

    async def follow(self, name: str) -> AsyncIterator[str]:
        """Server-sent events of a run until it ends: "status", "resources", "metrics", "log", "over"."""
        self._followers[name] = self._followers.get(name, 0) + 1
        try:
            feed = self._open(name)
            async for text in self._events(feed):
                yield text
        finally:
            self._followers[name] -= 1
            if not self._followers[name]:
                del self._followers[name]
                self._close(name)

    async def _events(self, feed: Feed) -> AsyncIterator[str]:
        version, point, line = -1, 0, 0
        yield "retry: 2000\n\n"
        while True:
            changed = feed.changed
            if feed.problem is not None:
                yield format_event("problem", {"message": feed.problem})
                return
            if feed.version != version and feed.status:
                version = feed.version
                yield format_event("status", {**feed.status, "words": live_words(feed.status)})
                yield format_event("resources", feed.resources)
            if point < len(feed.points):
                new = feed.points[point:]
                point += len(new)
                yield format_event("metrics", {"points": [point_document(each) for each in new]})
                yield format_event("curves", {"html": feed.curves})
            if line < feed.line_count:
                missing = feed.line_count - line
                kept = list(feed.lines)[-missing:]
                line = feed.line_count
                shown = [{"rank": rank, "text": text} for rank, text in kept]
                yield format_event("log", {"lines": shown, "left_out": missing - len(kept)})
            if feed.is_over:
                yield format_event("over", {})
                return
            try:
                await asyncio.wait_for(changed.wait(), IDLE_SECONDS)
            except TimeoutError:
                yield ": still here\n\n"

    def _open(self, name: str) -> Feed:
        if name not in self._feeds:
            feed = Feed()
            self._feeds[name] = feed, asyncio.create_task(self._watch(name, feed))
        return self._feeds[name][0]

    def _close(self, name: str) -> None:
        found = self._feeds.pop(name, None)
        if found is not None:
            found[1].cancel()

    async def _watch(self, name: str, feed: Feed) -> None:
        loop = asyncio.get_running_loop()
        thread = ThreadPoolExecutor(1, thread_name_prefix="watcher")
        watcher: Watcher | None = None
        try:
            watcher = await loop.run_in_executor(thread, Watcher, self._config, name)
            silence = Silence()
            while not feed.is_over:
                begun = time.monotonic()
                with suppress(StoreLockedError):  # later news come with the next observation
                    try:
                        news = await loop.run_in_executor(thread, watcher.look)
                        if news.points:
                            points = [*feed.points, *news.points][:MAX_POINTS]
                            feed.curves = await loop.run_in_executor(thread, render_curves, points, news.status)
                            feed.points = points
                        self._take(feed, news)
                        silence.end()
                    except (UnreachableError, CredentialError) as error:
                        silence.tolerate(error, begun)
                        self._note_silence(feed, silence)
                await asyncio.sleep(max(0.05, POLL_SECONDS - (time.monotonic() - begun)))
        except (MlbenchError, OSError, ValueError) as error:
            feed.problem = error.message if isinstance(error, MlbenchError) else str(error)
            self._wake(feed)
        finally:
            if watcher is not None:
                thread.submit(watcher.close)
            thread.shutdown(wait=False)  # it may still wait for a cluster, and all requests would wait with it

    def _take(self, feed: Feed, news: "News") -> None:
        feed.lines.extend(news.lines)
        feed.line_count += news.line_count
        is_new = (news.status, news.resources) != (feed.status, feed.resources)
        feed.status, feed.resources, feed.is_over = news.status, news.resources, news.is_over
        feed.version += is_new
        if is_new or news.points or news.lines or news.is_over:
            self._wake(feed)

    def _note_silence(self, feed: Feed, silence: Silence) -> None:
        """Show the last known status, with the finding that the cluster does not answer."""
        finding = silence.finding()
        if finding is None or not feed.status:
            return
        others = [item for item in feed.status.get("findings", ()) if item.get("code") != UNREACHABLE]
        feed.status = {**feed.status, "findings": [finding.to_dict(), *others]}
        feed.version += 1
        self._wake(feed)

    @staticmethod
    def _wake(feed: Feed) -> None:
        feed.changed.set()
        feed.changed = asyncio.Event()


def render_curves(points: list[MetricPoint], status: JsonObject) -> str:
    """The figures of all metrics so far; `data-points` is the number of values."""
    found = status.get("goal")
    goal = Goal(found["metric"], found["comparison"], found["threshold"]) if found else None
    counts = Counter(point.name for point in points)
    figures = (
        f'<figure data-curve="{escape(figure.key)}" data-points="{counts[figure.key]}">'
        f"<figcaption><strong>{escape(figure.title)}</strong></figcaption>{render_svg(figure)}</figure>"
        for figure in live_charts(points, goal)
    )
    return "".join(figures)


def latest_resources(handle: RunHandle) -> dict[int, JsonObject]:
    """CPU seconds and traffic in MB so far, and the recent maximum of memory in MiB. Reads only the end of the samples.

    The maximum, because the last sample of a process that has ended is 0.
    """
    found: dict[int, JsonObject] = {}
    for sample in handle.latest_samples():
        traffic = None
        if sample.received_bytes is not None or sample.sent_bytes is not None:
            traffic = ((sample.received_bytes or 0.0) + (sample.sent_bytes or 0.0)) / 1e6
        before = found.get(sample.rank, {}).get("memory")
        memory = before if sample.rss_bytes is None else max(before or 0.0, sample.rss_bytes / 2**20)
        found[sample.rank] = {"cpu": sample.cpu_seconds, "memory": memory, "traffic": traffic}
    return found


def format_event(kind: str, document: JsonObject) -> str:
    """A server-sent event: JSON has no line ends."""
    return f"event: {kind}\ndata: {json.dumps(document, default=str)}\n\n"


def point_document(point: MetricPoint) -> JsonObject:
    """A point for JSON: non-finite values are strings, as in an archive."""
    is_finite = point.value - point.value == 0
    return {
        "rank": point.rank,
        "time": point.time,
        "name": point.name,
        "value": point.value if is_finite else str(point.value),
        "epoch": point.epoch,
        "step": point.step,
        "seconds": point.seconds,
    }
