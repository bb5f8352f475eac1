"""Events of a followed run: their format, their order, what is left out, and who may follow."""

import asyncio
import json
from collections import deque
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from mlbench_cli.errors import UsageError
from mlbench_cli.results.analysis.tables import MetricPoint
from mlbench_cli.server import live
from mlbench_cli.server.config import ServerConfig
from mlbench_cli.server.live import Feeds, News, TooManyFollowers, format_event, point_document, render_curves

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
    """Yields prepared news, then raises."""

    news: tuple[News, ...] = ()
    error: Exception | None = None
    closed = 0

    def __init__(self, *_: object) -> None:
        self._left = list(self.news)

    def look(self) -> News:
        if not self._left:
            raise self.error or AssertionError("nothing is left")
        return self._left.pop(0)

    def close(self) -> None:
        type(self).closed += 1


def news(lines: int = 0, points: int = 0, *, count: int | None = None, is_over: bool = False, **status: Any) -> News:
    texts = deque((0, f"line {number}") for number in range(lines))
    return News({"name": "a", **status}, {"0": {"cpu": 1.0}}, [POINT] * points, texts, count or lines, is_over)


def follow(monkeypatch: pytest.MonkeyPatch, *prepared: News, error: Exception | None = None) -> list[tuple[str, Any]]:
    """The events that one follower gets, without pauses."""
    monkeypatch.setattr(live, "Watcher", type("Prepared", (Watcher,), {"news": prepared, "error": error}))
    monkeypatch.setattr(live, "POLL_SECONDS", 0.0)

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
