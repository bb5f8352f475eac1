"""What several tests of the agent share."""

import os

import pytest

from mlbench_cli.agent import processes


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """The signals that the agent sends; none of them arrives."""
    found: list[tuple[str, int, int]] = []
    monkeypatch.setattr(processes, "signal_group", lambda pid, number: found.append(("group", pid, number)))
    monkeypatch.setattr(os, "kill", lambda pid, number: found.append(("process", pid, number)))
    return found
