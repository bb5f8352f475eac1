"""A plugin of pytest: tests that share something expensive run in one worker (tests/workers.py).

A fixture of a module or session is made again by each worker that needs it: a server, a process with torch loaded, a
cluster at a double. All other tests go to whichever worker is free.
"""

import zlib
from typing import Any

import pytest

# Each has a process with torch, and starts trainings of two to four ranks: more at once only wait for each other.
TRAINING_GROUPS = 3


def group_of(path: str, fixtures: dict[str, str]) -> str | None:
    """The group of a test: `fixtures` are those that it uses of our own, name -> scope."""
    if "ranks" in fixtures:
        return f"trainings {zlib.crc32(path.encode()) % TRAINING_GROUPS}"
    return path if {"module", "session"} & set(fixtures.values()) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests with their groups."""
    for item in items:
        known: dict[str, Any] = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
        own = {name: str(found[-1].scope) for name, found in known.items() if found[-1].baseid.startswith("tests")}
        if group := group_of(item.nodeid.partition("::")[0], own):
            item.add_marker(pytest.mark.group(group))
