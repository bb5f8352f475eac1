"""Questions on a terminal: what cannot be provoked by typing."""

import os
import select
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mlbench_cli.console import prompts


@pytest.fixture
def type_keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bytes], None]]:
    """Types into what the keyboard reads from."""
    reading, writing = os.pipe()
    keyboard = os.fdopen(reading)
    monkeypatch.setattr(sys, "stdin", keyboard)

    def write(data: bytes) -> None:
        os.write(writing, data)

    yield write
    keyboard.close()
    os.close(writing)


def test_a_signal_in_an_unlucky_moment_is_looked_at_soon(
    type_keys: Callable[[bytes], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that comes just before a wait does not end it, so that no wait may last until a key is pressed."""
    waits: list[float] = []

    def wait(reading: Any, writing: Any, errors: Any, seconds: float) -> Any:
        waits.append(seconds)
        if len(waits) == 3:
            type_keys(b"x")
        return real(reading, writing, errors, 0.0)

    real = select.select
    monkeypatch.setattr(select, "select", wait)
    assert prompts.Keyboard().read_key() == "x"
    assert waits == [prompts.SIGNAL_SECONDS] * 3
