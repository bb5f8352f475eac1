"""A `python` for agents: a rank of a catalog task is forked from the program that has torch loaded (forks.py).

All other command lines are those of the real interpreter. The rank writes where this process would, and this process
ends as the rank does, so that an agent sees what it always sees, but for the processor time, which is the rank's.
"""

import json
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[3]
PYTHON = """#!{real} -IS
import sys
sys.path.append({root!r})
from tests.contract.task_images.launcher import main
main({real!r}, {address!r})
"""
MLBENCH = """#!{real}
import sys
sys.executable = {python!r}
from mlbench_cli.__main__ import main
sys.exit(main())
"""


def write(folder: Path, address: str) -> None:
    """Write `python`, and `mlbench`, whose runs use it, into a folder."""
    python = folder / "python"
    for name, text in (("python", PYTHON), ("mlbench", MLBENCH)):
        path = folder / name
        path.write_text(text.format(real=sys.executable, root=str(ROOT), address=address, python=str(python)))
        path.chmod(0o755)


def main(real: str, address: str) -> None:
    words = sys.argv[1:]
    if not (len(words) == 4 and words[0].endswith("/isolation.py") and words[2] == "task_images.run"):
        os.execv(real, [real, *words])
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        orders, answers = connection.makefile("w"), connection.makefile("r")
        outputs = [f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in (1, 2)]
        job = {"module": " ".join(words[2:]), "environments": [dict(os.environ)], "outputs": [outputs]}
        assert json.loads(answers.readline()) == "ready"
        print(json.dumps(job), file=orders, flush=True)
        [rank] = json.loads(answers.readline())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: os.kill(rank, number))
        [code] = json.loads(answers.readline())
    if code < 0:
        with suppress(OSError):  # KILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)
