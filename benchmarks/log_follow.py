"""A million lines of a log on their way from a node to its run's head, through a proxy that cuts the connections.

usage: python benchmarks/log_follow.py [LINES]
"""

import hashlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from mlbench_cli.agent import link
from mlbench_cli.engines.placement import NodeShare
from mlbench_cli.engines.plan import make_plan
from mlbench_cli.model.cluster_details import MachineDetails
from mlbench_cli.model.spec import RunSpec
from tests.fakes.cutting_proxy import CuttingProxy

WORDS = "of many lines that a training may print"
START = "import sys; from mlbench_cli.agent.{} import main; sys.exit(main(sys.argv[1:]))"


def main(count: int) -> None:
    argv = ("seq", "-f", f"%.0f {WORDS}", str(count))
    spec = RunSpec("bench-1", "c", "hosts", "custom", "custom", argv, "gloo", 1)
    wanted = hashlib.sha256("".join(f"{number} {WORDS}\n" for number in range(1, count + 1)).encode())
    with tempfile.TemporaryDirectory() as folder:
        here, there = Path(folder, "head"), Path(folder, "node")
        details = MachineDetails(folder=folder, python=sys.executable, interface="lo")
        plan = json.dumps(make_plan(spec, details, [NodeShare((0,), address="127.0.0.1")], lock="share"))
        for place in (here, there):
            place.mkdir()
            (place / "plan.json").write_text(plan)
        with subprocess.Popen([sys.executable, "-c", START.format("head"), str(here)]) as head:
            while (note := link.read_note(str(here), link.HEAD)) is None:
                time.sleep(0.05)
            with CuttingProxy("127.0.0.1", note["port"], least=1 << 20, most=8 << 20) as proxy:
                link.write_note(str(there), link.HEAD, ["127.0.0.1"], proxy.port, note["token"])
                (there / "nodes/0").mkdir(parents=True)
                begun = time.perf_counter()
                subprocess.run([sys.executable, "-c", START.format("node"), str(there / "nodes/0")], check=True)
                seconds = time.perf_counter() - begun
            head.wait()
        log = (here / "nodes/0/logs/rank-0.log").read_bytes()
    same = hashlib.sha256(log).hexdigest() == wanted.hexdigest()
    print(f"{count} lines, {len(log) / 1e6:.0f} MB, {proxy.cuts} connections cut: {seconds:.1f} s")
    print(f"bytes {'right' if same else 'WRONG'}: 0 lines lost, 0 doubled" if same else "bytes WRONG")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
