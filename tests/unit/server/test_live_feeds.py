"""Events of a followed run: their format, their order, what is left out, and who may follow."""

import asyncio
import json
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette")

from mlbench_cli.engines.base import Cursor
from mlbench_cli.errors import CredentialError, StoreLockedError, UnreachableError, UsageError
from mlbench_cli.results.analysis.tables import MetricPoint
from mlbench_cli.server import live
from mlbench_cli.server.config import ServerConfig
from mlbench_cli.server.live import Feeds, News, TooManyFollowers, format_event, point_document, render_curves
from task_images import contract
from tests.fakes.engine import FakeEngine

CONFIG = ServerConfig(Path("/none"), 8080, token="t")
POINT = MetricPoint("a-2", 2, 1, 5.0, "loss", 0.5, 1.0, 10.0, 2.5)
SHOWN = {"rank": 1, "time": 5.0, "name": "loss", "value": 0.5, "epoch": 1.0, "step": 10.0, "seconds": 2.5}


def test_an_event_is_one_line_of_json() -> None:
    text = format_event("log", {"text": "a\nb", "path": Path("/x")})
    assert text == 'event: log\ndata: {"text": "a\\nb", "path": "/x"}\n\n'


@pytest.mark.parametrize(
    ("value", "shown"), [(0.5, 0.5), (float("nan"), "nan"), (float("inf"), "inf"), (float("-inf"), "-inf"), (0.0, 0.0)]
)
def test_values_that_json_does_not_know_are_texts(value: float, shown: Any) -> None:
    document = point_document(MetricPoint("a-2", 2, 1, 5.0, "loss", value, 1.0, 10.0, 2.5))
    assert document == {**SHOWN, "value": shown}


def test_figures_say_how_many_values_they_have() -> None:
    points = [MetricPoint("a-2", 2, 0, float(t), "loss", 1.0 / (1 + t), seconds=float(t)) for t in range(3)]
    html = render_curves(points, {"goal": {"metric": "loss", "comparison": "<=", "threshold": 0.4}})
    assert html.count("<figure ") == html.count("</figure>") == 1
    assert '<figure data-curve="loss" data-points="3"><figcaption><strong>' in html
    assert "<svg" in html
    assert render_curves([], {}) == ""


class Watcher:
    """Yields or raises what was prepared, then raises."""

    news: tuple[News | Exception, ...] = ()
    error: Exception | None = None
    closed = 0
    made = 0

    def __init__(self, *_: object) -> None:
        type(self).made += 1
        self._left = list(self.news)

    def look(self) -> News:
        if not self._left:
            raise self.error or AssertionError("nothing is left")
        found = self._left.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        type(self).closed += 1


def news(lines: int = 0, points: int = 0, *, count: int | None = None, is_over: bool = False, **status: Any) -> News:
    texts = deque((0, f"line {number}") for number in range(lines))
    return News({"name": "a", **status}, {"0": {"cpu": 1.0}}, [POINT] * points, texts, count or lines, is_over)


def prepare(
    monkeypatch: pytest.MonkeyPatch, *prepared: News | Exception, error: Exception | None = None
) -> type[Watcher]:
    """Observations that are these, without pauses between them."""
    found = type("Prepared", (Watcher,), {"news": prepared, "error": error})
    monkeypatch.setattr(live, "Watcher", found)
    monkeypatch.setattr(live, "POLL_SECONDS", 0.0)
    return found


def follow(
    monkeypatch: pytest.MonkeyPatch, *prepared: News | Exception, error: Exception | None = None
) -> list[tuple[str, Any]]:
    """The events that one follower gets."""
    prepare(monkeypatch, *prepared, error=error)

    async def collect() -> list[str]:
        feeds = Feeds(CONFIG)
        found = [text async for text in feeds.follow("a")]
        feeds.require_room()
        return found

    texts = asyncio.run(collect())
    assert texts.pop(0) == "retry: 2000\n\n"
    pairs = [text.removeprefix("event: ").strip().split("\ndata: ") for text in texts]
    return [(kind, json.loads(data)) for kind, data in pairs]


def test_a_follower_gets_everything_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    found = follow(monkeypatch, news(lines=2, points=1), news(lines=1, state="finished", is_over=True))
    status, resources = {"name": "a"}, {"0": {"cpu": 1.0}}
    curves = [data for kind, data in found if kind == "curves"]
    assert [item for item in found if item[0] != "curves"] == [
        ("status", status),
        ("resources", resources),
        ("metrics", {"points": [SHOWN]}),
        ("log", {"lines": [{"rank": 0, "text": "line 0"}, {"rank": 0, "text": "line 1"}], "left_out": 0}),
        ("status", {**status, "state": "finished"}),
        ("resources", resources),
        ("log", {"lines": [{"rank": 0, "text": "line 0"}], "left_out": 0}),
        ("over", {}),
    ]
    assert len(curves) == 1
    assert 'data-points="1"' in curves[0]["html"]


def test_lines_that_were_dropped_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    found = dict(follow(monkeypatch, news(lines=2, count=7, is_over=True)))
    assert found["log"] == {
        "lines": [{"rank": 0, "text": "line 0"}, {"rank": 0, "text": "line 1"}],
        "left_out": 5,
    }


def test_a_status_that_did_not_change_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    found = follow(monkeypatch, news(lines=1), news(lines=1), news(is_over=True))
    assert [kind for kind, _ in found].count("status") == 1


@pytest.mark.parametrize("error", [UsageError("It broke."), OSError("It broke."), ValueError("It broke.")])
def test_a_problem_ends_the_events_with_its_message(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    found = follow(monkeypatch, news(lines=1), error=error)
    assert found[-1] == ("problem", {"message": "It broke."})


def test_only_so_many_pages_follow_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_FOLLOWERS", 2)
    monkeypatch.setattr(live, "Watcher", type("Prepared", (Watcher,), {"news": (news(),) * 100}))
    monkeypatch.setattr(live, "POLL_SECONDS", 0.0)

    async def attempt() -> None:
        feeds = Feeds(CONFIG)
        one, two = feeds.follow("a"), feeds.follow("a")
        await anext(one)
        feeds.require_room()
        await anext(two)
        with pytest.raises(TooManyFollowers, match="2 pages already follow runs"):
            feeds.require_room()
        await two.aclose()  # type: ignore[attr-defined]
        feeds.require_room()
        await one.aclose()  # type: ignore[attr-defined]

    asyncio.run(attempt())


# --- clusters that do not answer ------------------------------------------------------------------------------------


def findings(found: list[tuple[str, Any]]) -> list[Any]:
    """Code and retryable of the findings in each status."""
    return [[item["code"] for item in data.get("findings", ())] for kind, data in found if kind == "status"]


def test_a_silent_cluster_is_a_finding_beside_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlbench_cli.model.silence.SHORT_SECONDS", 0.0)
    before = [{"code": "slow", "summary": ""}, {"code": "unreachable", "summary": ""}]
    away = UnreachableError("No answer.")
    found = follow(monkeypatch, news(findings=before), away, away, news(findings=before[:1]), news(is_over=True))
    shown = findings(found)
    assert shown[0] == ["slow", "unreachable"]
    assert ["unreachable", "slow"] in shown[1:]
    assert not any(codes.count("unreachable") > 1 for codes in shown)
    assert shown[-2:] == [["slow"], []]
    assert "problem" not in dict(found)
    texts = [data["findings"][0]["summary"] for kind, data in found if kind == "status" and data.get("findings")]
    assert any(text.startswith("No answer. The run may continue there.") for text in texts)


def test_a_short_silence_is_not_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    found = follow(monkeypatch, news(), UnreachableError("No answer."), news(is_over=True))
    assert findings(found) == [[]]
    assert found[-1] == ("over", {})


def test_a_cluster_that_never_answered_has_no_status_to_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlbench_cli.model.silence.SHORT_SECONDS", 0.0)
    found = follow(monkeypatch, UnreachableError("No answer."), UnreachableError("No answer."), news(is_over=True))
    assert findings(found) == [[]]


def test_credentials_may_be_refused_for_a_while_once_they_were_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = CredentialError("It says no.")
    assert follow(monkeypatch, news(), refused, news(is_over=True))[-1] == ("over", {})
    assert follow(monkeypatch, refused, news(is_over=True)) == [("problem", {"message": "It says no."})]


def test_a_store_that_is_locked_is_read_later(monkeypatch: pytest.MonkeyPatch) -> None:
    locked = StoreLockedError("Another process has it.")
    found = follow(monkeypatch, locked, news(lines=1), locked, news(is_over=True))
    assert [kind for kind, _ in found] == ["status", "resources", "log", "over"]


# --- several followers, and limits ----------------------------------------------------------------------------------


def test_points_beyond_the_limit_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_POINTS", 3)
    found = follow(monkeypatch, news(points=2), news(points=2), news(points=2, is_over=True))
    assert sum(len(data["points"]) for kind, data in found if kind == "metrics") == 3


def test_of_many_lines_the_last_are_kept_for_a_late_follower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_LINES", 2)
    found = dict(follow(monkeypatch, news(lines=3, is_over=True)))
    assert [line["text"] for line in found["log"]["lines"]] == ["line 1", "line 2"]
    assert found["log"]["left_out"] == 1


def test_a_run_is_observed_once_for_all_of_its_followers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one comes later and still gets everything; the last one that goes ends the observation."""
    watcher = prepare(monkeypatch, news(lines=1, points=1), *(news() for _ in range(1000)))

    async def kinds(events: Any, last: str) -> list[str]:
        found: list[str] = []
        while not found or found[-1] != last:
            found.append((await anext(events)).partition("\n")[0])
        return found

    async def attempt() -> None:
        feeds = Feeds(CONFIG)
        one, two = feeds.follow("a"), feeds.follow("a")
        expected = ["retry: 2000", *(f"event: {kind}" for kind in ("status", "resources", "metrics", "curves", "log"))]
        assert await kinds(one, "event: log") == expected
        assert await kinds(two, "event: log") == expected
        await one.aclose()  # type: ignore[attr-defined]
        await asyncio.sleep(0.02)
        assert (watcher.made, watcher.closed) == (1, 0)
        await two.aclose()  # type: ignore[attr-defined]
        while not watcher.closed:
            await asyncio.sleep(0.01)
        three = feeds.follow("a")
        await kinds(three, "event: log")
        assert watcher.made == 2
        await three.aclose()  # type: ignore[attr-defined]

    asyncio.run(attempt())


def test_a_silent_connection_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(monkeypatch, *(news() for _ in range(1000)))
    monkeypatch.setattr(live, "IDLE_SECONDS", 0.01)

    async def attempt() -> None:
        events = Feeds(CONFIG).follow("a")
        found = [await anext(events)]
        while found[-1].startswith(("retry", "event")):
            found.append(await anext(events))
        assert found[-1] == ": still here\n\n"
        await events.aclose()  # type: ignore[attr-defined]

    asyncio.run(attempt())


# --- what is observed -----------------------------------------------------------------------------------------------


class Home:
    """A client whose only run has `ranks` ranks, and the lines of its log."""

    def __init__(self, ranks: int, lines: dict[int, list[bytes]]) -> None:
        self.engine = FakeEngine(logs=lines)
        self.cursors: list[tuple[int, int | None]] = []
        spec = SimpleNamespace(world_size=ranks, workers=2)
        samples = [SimpleNamespace(rank=1, cpu_seconds=2.0, rss_bytes=None, received_bytes=None, sent_bytes=None)]
        self.is_sealed, self.closed = False, False
        self.run = SimpleNamespace(
            name="a-2",
            run=SimpleNamespace(spec=spec),
            status=lambda: {"state": "running"},
            latest_samples=lambda: samples,
        )

    def __call__(self, home: Path, *, patience: float) -> "Home":
        assert (home, patience) == (CONFIG.home, 2.0)
        return self

    def find_run(self, name: str) -> Any:
        assert name == "a"
        self.run.is_sealed = self.is_sealed
        return self.run

    def engine_of(self, _: object) -> "Home":
        return self

    def logs(self, run: Any, rank: int, since: Cursor | None) -> Any:
        self.cursors.append((rank, None if since is None else since.offset))
        return self.engine.logs(run, rank, since)

    def close(self) -> None:
        self.closed = True


def metric(rank: int, **fields: Any) -> bytes:
    event = {"v": 1, "event": "metric", "rank": rank, "time": 5.0, "name": "loss", "value": 0.5, **fields}
    return contract.format_event(event).encode() + b"\n"


def test_an_observation_has_new_lines_and_points_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    phase = contract.format_event({"v": 1, "event": "phase", "rank": 0, "time": 5.0, "phase": "x"}).encode()
    lines = {0: [b"one\r\n", metric(0), phase, b"\x1b[31m\tred\r50%\n"], 1: [b"x" * 5000, metric(1, value="no")]}
    home = Home(2, lines)
    monkeypatch.setattr(live, "Client", home)
    watcher = live.Watcher(CONFIG, "a")
    found = watcher.look()
    assert found.lines == deque([(0, "one"), (0, "\\x1b[31m\tred\r50%"), (1, "x" * 4000)])
    assert (found.line_count, found.is_over) == (3, False)
    assert found.points == [MetricPoint("a-2", 2, 0, 5.0, "loss", 0.5)]
    assert found.status == {"state": "running"}
    assert found.resources == {"1": {"cpu": 2.0, "memory": None, "traffic": None}}
    home.engine.lines[0].append(b"two\n")
    again = watcher.look()
    assert (again.lines, again.points, again.line_count) == (deque([(0, "two")]), [], 1)
    assert home.cursors == [(0, None), (1, None), (0, 4), (1, 2)]
    watcher.close()
    assert home.closed


def test_a_run_is_over_when_it_is_sealed_before_its_logs_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(1, {0: [b"one\n"]})
    home.is_sealed = True
    monkeypatch.setattr(live, "Client", home)
    assert live.Watcher(CONFIG, "a").look().is_over


def test_few_logs_and_lines_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_RANKS", 2)
    monkeypatch.setattr(live, "MAX_LINES", 2)
    home = Home(3, {0: [b"one\n", b"two\n"], 1: [b"three\n"], 2: [b"four\n"]})
    monkeypatch.setattr(live, "Client", home)
    found = live.Watcher(CONFIG, "a").look()
    assert (found.lines, found.line_count) == (deque([(0, "two"), (1, "three")]), 3)
