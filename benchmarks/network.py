"""Shaped networks of this machine: what was asked for against what a probe among the workers measures.

    python -m benchmarks.network [--workers N,N] [--as root,user] [--rounds N] [NETWORK ...]

Five networks with 2 and 4 workers by default, as root and as an ordinary user: who starts this as root is
measured first, then the user "nobody" with a copy of the code, in a user namespace if the kernel allows that. A cell is
made as a run makes it, with up to three probes until one fits; with --rounds it is made that often, and figures are
medians. Prints one line per cell: goodput alone and with all workers sending, round trip, time to make it, late packets
and CPU seconds of the switch, and whether a run would be accepted. The exit code is 1 if a cell is not.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlbench_cli.agent.network.namespaces import ShapingError
from mlbench_cli.agent.network.shaped import ATTEMPTS, ShapedNetwork
from mlbench_cli.model.network import find_deviations, format_rate, format_seconds, parse_network

ROOT = Path(__file__).parents[1]
NETWORKS = ("10mbit,20ms", "100mbit,5ms", "100mbit,1ms", "1gbit,5ms", "1gbit,1ms")
NOBODY = 65_534
ROLES = ("root", "user")


@dataclass(frozen=True)
class Cell:
    """One network as it was made and probed: bits per second, seconds, and the deviations of the last probe."""

    alone: float
    together: float
    trip: float
    made: float
    late_share: float
    cpu: float
    probes: int
    problems: tuple[str, ...]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=NETWORKS, metavar="NETWORK", help="as of mlbench run --network")
    parser.add_argument("--workers", default="2,4", metavar="N,N", help="numbers of workers; default: 2,4")
    parser.add_argument("--as", dest="roles", metavar="ROLE,ROLE", help="root, user; default: both if started by root")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="how often each cell is made; default: 1")
    given = parser.parse_args()
    roles = given.roles.split(",") if given.roles else ROLES if os.geteuid() == 0 else ROLES[1:]
    if not set(roles) <= set(ROLES) or ("root" in roles and os.geteuid()):
        parser.error("--as takes root and user; root has to be root already")
    networks = [str(parse_network(text)) for text in given.networks]
    sizes = [int(word) for word in given.workers.split(",")]
    failed = 0
    for role in roles:
        if role == "user" and os.geteuid() == 0:
            failed += start_as_user(networks, given.workers, given.rounds)
        else:
            failed += measure_all(role, networks, sizes, given.rounds)
    return 1 if failed else 0


def measure_all(role: str, networks: Sequence[str], sizes: Sequence[int], rounds: int) -> int:
    """Print a line for each cell; the number of those that no run would be accepted on."""
    name = "root" if role == "root" else f"an ordinary user (uid {os.geteuid()})"
    print(f"as {name}, load {os.getloadavg()[0]:.1f}", flush=True)
    failed = 0
    for text in networks:
        for workers in sizes:
            try:
                cells = [measure(text, workers) for _ in range(rounds)]
            except ShapingError as error:
                print(f"{text:<12} {workers} workers: {error}", flush=True)
                failed += 1
                continue
            failed += any(cell.problems for cell in cells)
            print(f"{text:<12} {workers} workers: {describe(cells)}", flush=True)
    print(f"as {name}: {len(networks) * len(sizes) - failed} of {len(networks) * len(sizes)} hold", flush=True)
    return failed


def measure(text: str, workers: int) -> Cell:
    """Make a network, and probe it until it fits, as a run does. Raises ShapingError."""
    shape = parse_network(text)
    begun = time.perf_counter()
    network = ShapedNetwork(shape, workers)
    made = time.perf_counter() - begun
    try:
        probes, problems = 0, ["it was not measured"]
        while problems and probes < ATTEMPTS:
            report = network.probe("before")
            problems, probes = find_deviations(shape, report), probes + 1
        counters = network._count()["switch"] or {}
    finally:
        network.close()
    links = report.get("links")
    if not isinstance(links, list):
        raise ShapingError("; ".join(problems))
    alone, together, trip = (
        find_median(links, name) for name in ("alone_bits_per_second", "together_bits_per_second", "rtt_p50_seconds")
    )
    late = counters.get("late_packets", 0) / max(1, counters.get("packets", 0))
    return Cell(alone, together, trip, made, late, counters.get("cpu_seconds", 0), probes, tuple(problems))


def find_median(links: Sequence[Mapping[str, float]], name: str) -> float:
    return statistics.median_high(link[name] for link in links if name in link)


def describe(cells: Sequence[Cell]) -> str:
    """Medians over the rounds, and the verdict."""
    alone, together, trip, made, late, cpu = (
        statistics.median(getattr(cell, name) for cell in cells)
        for name in ("alone", "together", "trip", "made", "late_share", "cpu")
    )
    problems = sorted({problem for cell in cells for problem in cell.problems})
    probes = max(cell.probes for cell in cells)
    verdict = "; ".join(problems) or f"holds{f' at probe {probes}' if probes > 1 else ''}"
    return (
        f"{format_rate(alone)} alone, {format_rate(together)} together, RTT {format_seconds(trip)}, "
        f"made in {1000 * made:.0f} ms, {100 * late:.0f} % late, {cpu:.2f} s of CPU; {verdict}"
    )


def start_as_user(networks: Sequence[str], workers: str, rounds: int) -> int:
    """Measure as "nobody", who can read neither this folder nor perhaps this interpreter; 0 if all cells hold."""
    interpreter = find_common_interpreter()
    if interpreter is None:
        print("as an ordinary user: not measured, since there is no interpreter that every user may start")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        for package in ("mlbench_cli", "task_images", "benchmarks"):
            shutil.copytree(ROOT / package, Path(folder, package), ignore=shutil.ignore_patterns("__pycache__"))
        Path(folder).chmod(0o755)
        words = ["-m", "benchmarks.network", "--as", "user", "--workers", workers, "--rounds", str(rounds), *networks]
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONDONTWRITEBYTECODE": "1", "HOME": folder}
        done = subprocess.run(
            [interpreter, *words], cwd=folder, env=environment, user=NOBODY, group=NOBODY, extra_groups=[]
        )
    return done.returncode


def find_common_interpreter() -> str | None:
    """A Python of this one's version or later that the system has for all users."""
    for name in (os.path.realpath(sys.executable), shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin")):
        if name is None:
            continue
        words = [name, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
        try:
            found = subprocess.run(words, user=NOBODY, group=NOBODY, extra_groups=[], cwd="/", capture_output=True)
        except OSError:
            continue
        if found.returncode == 0:
            return name
    return None


if __name__ == "__main__":
    sys.exit(main())
