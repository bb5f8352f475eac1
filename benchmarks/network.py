"""Shaped networks: what was asked for against what a probe among the workers measures.

    python -m benchmarks.network [WORKERS,WORKERS] [NETWORK NETWORK ...]

Prints one line for each network and number of workers: goodput alone and with all workers sending, round trip, time to
make it, late packets and CPU seconds of the switch, and whether it would be accepted for a run.
"""

import os
import statistics
import sys
import time
from collections.abc import Mapping

from mlbench_cli.engines.local.network.namespaces import ShapingError
from mlbench_cli.engines.local.network.shaped import ShapedNetwork
from mlbench_cli.network import find_deviations, parse_network

NETWORKS = ("10mbit,20ms", "100mbit,5ms", "100mbit,1ms", "1gbit,5ms", "1gbit,1ms")


def main(arguments: list[str]) -> None:
    sizes = [int(word) for word in (arguments[0] if arguments else "2,4").split(",")]
    user = "root" if os.geteuid() == 0 else "an ordinary user"
    print(f"as {user}, load {os.getloadavg()[0]:.1f}")
    for text in arguments[1:] or NETWORKS:
        for workers in sizes:
            try:
                measure(text, workers)
            except ShapingError as error:
                print(f"{text:<12} {workers} workers: {error}")


def measure(text: str, workers: int) -> None:
    shape = parse_network(text)
    begun = time.perf_counter()
    network = ShapedNetwork(shape, workers)
    made = time.perf_counter() - begun
    try:
        report = network.probe("before")
        counters = network._count()["switch"] or {}
    finally:
        network.close()
    links = report["links"]
    assert isinstance(links, list)
    alone, together, trip = (find_median(links, name) for name in ("alone", "together", "rtt"))
    verdict = "; ".join(find_deviations(shape, report)) or "holds"
    late = 100 * counters.get("late_packets", 0) / max(1, counters.get("packets", 0))
    print(
        f"{text:<12} {workers} workers: {alone / 1e6:7.1f} Mbit/s alone, {together / 1e6:7.1f} together, "
        f"RTT {1000 * trip:6.2f} ms, made in {1000 * made:.0f} ms, {late:.0f} % late, "
        f"{counters.get('cpu_seconds', 0):.2f} s of CPU; {verdict}",
        flush=True,
    )


def find_median(links: list[Mapping[str, float]], name: str) -> float:
    key = "rtt_p50_seconds" if name == "rtt" else f"{name}_bits_per_second"
    return statistics.median(link[key] for link in links if key in link)


if __name__ == "__main__":
    main(sys.argv[1:])
