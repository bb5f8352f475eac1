"""A plugin of pytest: tests that share something expensive run in one worker (tests/workers.py).

A fixture of a module or session is made again by each worker that needs it: a server, a process with torch loaded, a
cluster at a double. A test may also name its group with a mark. All others go to whichever worker is free.
"""

from typing import Any

import pytest

# Fixtures that a worker keeps beyond a unit of work, so that tests may use them anywhere.
KEPT = {"ranks"}


def group_of(path: str, fixtures: dict[str, str]) -> str | None:
    """The group of a test: `fixtures` are those that it uses of our own, name -> scope."""
    scopes = {scope for name, scope in fixtures.items() if name not in KEPT}
    return path if {"module", "session"} & scopes else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests with their groups."""
    for item in items:
        if item.get_closest_marker("group"):
            continue
        known: dict[str, Any] = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
        own = {name: str(found[-1].scope) for name, found in known.items() if found[-1].baseid.startswith("tests")}
        if group := group_of(item.nodeid.partition("::")[0], own):
            item.add_marker(pytest.mark.group(group))
