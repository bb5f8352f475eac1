"""A million lines of a log, followed through a proxy that cuts its connections at random: none lost, none doubled.

usage: python benchmarks/log_follow.py [LINES]

The lines come from the API double, which serves them as the kubelet does: time stamps, `sinceTime` to the second.
"""

import hashlib
import sys
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parents[1]))
from mlbench_cli.engines.kubernetes.collector import LogCollector
from mlbench_cli.kube.access import Access
from tests.fakes.cutting_proxy import CuttingProxy
from tests.fakes.kube_api import KubeApi, Log, stamp

RATE = 50_000  # lines in a second of the log's own time


def main(count: int) -> None:
    running = {"metadata": {"name": "r-0", "uid": "u", "labels": {}}, "spec": {}, "status": {"phase": "Running",
        "containerStatuses": [{"name": "main", "state": {"running": {"startedAt": "x"}}}]}}  # fmt: skip
    ended = {**running, "status": {"phase": "Succeeded", "containerStatuses": [
        {"name": "main", "state": {"terminated": {"exitCode": 0, "startedAt": "x"}}}]}}  # fmt: skip
    pods = {0: running}
    with KubeApi() as server, tempfile.TemporaryDirectory() as folder:
        server.put("pods", running)
        parts = urlsplit(server.url)
        with CuttingProxy(str(parts.hostname), parts.port or 80, least=1 << 20, most=16 << 20) as proxy:
            access = Access(f"http://127.0.0.1:{proxy.port}")
            collector = LogCollector(access, "default", Path(folder), [0], lambda: pods, lambda: False)
            begun = time.perf_counter()
            collector.start()
            writer = threading.Thread(target=write, args=(server, count))
            writer.start()
            writer.join()
            server.end_log("r-0")
            pods[0] = ended
            while not collector.complete(0):
                collector.wait(0.1)
            seconds = time.perf_counter() - begun
            collector.close()
        report(Path(folder, "logs/rank-0.log"), count, proxy.cuts, seconds)


def write(server: KubeApi, count: int) -> None:
    begun = time.time()
    for first in range(0, count, 1000):
        for number in range(first, min(first + 1000, count)):
            server.logs.setdefault("r-0", Log()).lines.append((stamp(begun + number / RATE), line(number)))
        with server.changed:
            server.changed.notify_all()


def line(number: int) -> bytes:
    return f"{number} loss 0.{number * 7919 % 10**9:09}".encode()


def report(path: Path, count: int, cuts: int, seconds: float) -> None:
    wanted = hashlib.sha256()
    for number in range(count):
        wanted.update(line(number) + b"\n")
    with open(path, "rb") as file:
        same = hashlib.file_digest(file, "sha256").hexdigest() == wanted.hexdigest()
        file.seek(0)
        numbers = [int(text.split(b" ", 1)[0]) for text in file]
    distinct = len(set(numbers))
    print(f"{count} lines in {seconds:.1f} s, {cuts} connections cut")
    print(f"lost {count - distinct}, doubled {len(numbers) - distinct}, bytes {'the same' if same else 'DIFFERENT'}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
