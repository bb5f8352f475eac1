"""The dashboard: start, first page, memory with 10 000 runs, 50 followers of one run, an event's way to a follower.

Wanted: start at most 1.5 s, first page 100 ms, 150 MB, 20 % of a core for 50 followers, an event there within 2 s.
`python benchmarks/serve.py`
"""

import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from mlbench_cli.storage.store import Store  # noqa: E402
from tests.contract.server.dashboards import Dashboard, serve  # noqa: E402
from tests.unit.results.runs import spec  # noqa: E402

RUNS, FOLLOWERS, SECONDS, ROUNDS = 10_000, 50, 12.0, 5
PROGRAM = """
import json, time
for step in range(1000):
    event = {'v': 1, 'event': 'metric', 'rank': 0, 'time': time.time(), 'name': 'loss', 'value': 1.0}
    print('@mlbench', json.dumps(event), flush=True)
    time.sleep(0.5)
"""


def fill(home: Path) -> None:
    store = Store(home)
    store._db.execute("PRAGMA synchronous=OFF")  # 10 000 transactions
    for number in range(RUNS):
        run = store.record_run(spec(name=f"run-{number}", workers=1))
        store._db.execute("UPDATE runs SET state = 'finished', outcome = 'completed' WHERE id = ?", (run.id,))
    store.close()


def memory(pid: int) -> float:
    """Resident MB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1000
    return 0.0


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def follow(dashboard: Dashboard, name: str, delays: list[float], until: float) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", dashboard.port, timeout=30)
    connection.request("GET", f"/api/v1/runs/{name}/events", headers={"Authorization": f"Bearer {dashboard.token}"})
    answer = connection.getresponse()
    is_first, kind = True, ""
    while time.time() < until:
        line = answer.fp.readline().decode() if answer.fp else ""
        if line.startswith("event: "):
            kind = line[7:].strip()
        elif line.startswith("data: ") and kind == "metrics":
            points = json.loads(line[6:])["points"]
            if not is_first:
                delays += [time.time() - point["time"] for point in points]
            is_first = False
        elif not line:
            break
    connection.close()


def bare_seconds() -> float:
    """How long `python -c pass` takes now: what a neighbor of this machine does to any start."""
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    return time.perf_counter() - begun


def measure_pages(home: Path) -> tuple[float, float, float, float, float]:
    """Seconds to the address, of the first page, the page again and its late part; CPU seconds of the start."""
    begun = time.perf_counter()
    with serve(home, "--allow-actions") as dashboard:
        started = time.perf_counter() - begun
        spent = cpu_seconds(dashboard.pid)
        time.sleep(1.0)  # a person needs longer to open it
        first, again, late = (ask_seconds(dashboard, path) for path in ("/", "/", "/listing"))
        return started, first, again, late, spent


def ask_seconds(dashboard: Dashboard, path: str) -> float:
    begun = time.perf_counter()
    assert dashboard.ask(path).status == 200
    return time.perf_counter() - begun


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        fill(home)
        rounds = [(bare_seconds(), *measure_pages(home)) for _ in range(ROUNDS)]
        bare, started, first, again, late, spent = (
            statistics.median(each[column] for each in rounds) for column in range(6)
        )
        print(f"python -c pass {bare * 1e3:.0f} ms; start to address {started:.2f} s, of which CPU {spent:.2f} s")
        print(
            f"first page {first * 1e3:.0f} ms, again {again * 1e3:.0f} ms, experiments and results {late * 1e3:.0f} ms"
        )
        with serve(home, "--allow-actions") as dashboard:
            program = home / "program.py"
            program.write_text(PROGRAM)
            words = {"name": "live", "workers": [1], "command": f"{sys.executable} {program}", "share_machine": True}
            assert dashboard.post("/api/v1/runs", words).status == 201
            time.sleep(3)
            delays: list[float] = []
            until = time.time() + SECONDS
            threads = [
                threading.Thread(target=follow, args=(dashboard, "live-1", delays, until), daemon=True)
                for _ in range(FOLLOWERS)
            ]
            for thread in threads:
                thread.start()
            time.sleep(2)
            before, at = cpu_seconds(dashboard.pid), time.time()
            for thread in threads:
                thread.join()
            share = (cpu_seconds(dashboard.pid) - before) / (time.time() - at)
            resident = memory(dashboard.pid)
            dashboard.post("/api/v1/runs/live-1/cancel", {})
        delays.sort()
        print(f"{RUNS} runs, {FOLLOWERS} followers: {resident:.0f} MB, {share:.0%} of a core")
        print(f"event to follower: median {delays[len(delays) // 2]:.2f} s, longest {delays[-1]:.2f} s")


if __name__ == "__main__":
    main()
