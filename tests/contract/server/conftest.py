"""A data folder with finished runs, made once."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlbench_cli.storage.store import Store
from tests.contract.server.dashboards import Dashboard, serve
from tests.unit.results import runs

RUNS = (("alpha-1", 1, 90.0), ("alpha-2", 2, 60.0), ("alpha-4", 4, 40.0))
SAMPLES = "".join(
    f'{{"time": {1_760_000_000 + second}, "rank": {rank}, "cpu_seconds": {second * 0.5}, "rss_bytes": 1000000, '
    f'"sent_bytes": {second * 1000}}}\n'
    for second in range(1, 4)
    for rank in (0, 1)
)


def record_sealed(store: Store, name: str, workers: int, seconds: float) -> None:
    """A sealed run of a task in the store, with hand-written logs."""
    runs.record_sealed(store, name, workers, seconds, samples=SAMPLES)


@pytest.fixture(scope="module")
def finished_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    store = Store(home)
    for name, workers, seconds in RUNS:
        record_sealed(store, name, workers, seconds)
    store.close()
    return home


@pytest.fixture(scope="module")
def dashboard(finished_home: Path) -> Iterator[Dashboard]:
    """Read-only."""
    with serve(finished_home) as found:
        yield found


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    """May act, on an empty store, in which its tests change nothing."""
    with serve(tmp_path_factory.mktemp("idle"), "--allow-actions") as found:
        yield found


@pytest.fixture
def acting(tmp_path: Path) -> Iterator[Dashboard]:
    """May act, on an empty store."""
    home = tmp_path / "home"
    home.mkdir()
    with serve(home, "--allow-actions") as found:
        yield found


@pytest.fixture
def program(tmp_path: Path) -> str:
    """A command that reports a metric ten times, and prints a hostile line."""
    path = tmp_path / "program.py"
    path.write_text(
        "import json, time\n"
        "for step in range(1, 11):\n"
        "    event = {'v': 1, 'event': 'metric', 'rank': 0, 'time': time.time(), 'name': 'loss', 'value': 1 / step}\n"
        "    print('@mlbench', json.dumps(event), flush=True)\n"
        "    print('line', step, '<img src=x onerror=document.title=1>', flush=True)\n"
        "    time.sleep(0.3)\n"
    )
    return f"{sys.executable} {path}"
