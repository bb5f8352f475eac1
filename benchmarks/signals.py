"""How soon a command ends after SIGTERM or Ctrl-C, at whatever moment of a run it comes.

    python benchmarks/signals.py [ROUNDS]

A run is sent the signal when it enters a function of the tool: recording, starting, reading logs, sealing, waiting for
a lock. Printed are the seconds from there to the end of the process, which should be below 2. One case has a thread
that nobody can stop, one a call that swallows the signal.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time

LIMIT = 2.0
PLACES = (
    "mlbench_cli.storage.store:Store.record_experiment",
    "mlbench_cli.engines.local.engine:LocalEngine.submit",
    "mlbench_cli.engines.follow:LogReader.read_new",
    "mlbench_cli.engines.local.engine:LocalHead.read",
    "mlbench_cli.runs.supervise:finalize",
    "mlbench_cli.runs.finalize:seal",
    "mlbench_cli.results.archive.seal:write_sums",
    "mlbench_cli.storage.run_folder:_wait_for_lock",
)
# The moment of the signal is printed by the program itself, on stdout, which commands under test do not use before.
PROGRAM = """
import importlib, os, signal, sys, threading, time
place, number, case, *argv = sys.argv[1:]
module, _, path = place.partition(":")
owner = importlib.import_module(module)
*parents, name = path.split(".")
for parent in parents:
    owner = getattr(owner, parent)
real = getattr(owner, name)
def intercept(*arguments, **options):
    setattr(owner, name, real)
    os.write(1, f"at {time.time()}\\n".encode())
    try:
        os.kill(os.getpid(), int(number))
        time.sleep(0.01)
        return real(*arguments, **options)
    except BaseException:
        if case == "swallowed":
            time.sleep(600)
        raise
setattr(owner, name, intercept)
if case == "thread":
    threading.Thread(target=time.sleep, args=(600,)).start()
sys.argv = ["mlbench", *argv]
from mlbench_cli.__main__ import main
sys.exit(main())
"""


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    worst = 0.0
    cases = [(place, "plain") for place in PLACES]
    cases += [("mlbench_cli.storage.store:Store.record_experiment", case) for case in ("thread", "swallowed")]
    print(f"{'PLACE':<56}{'CASE':<11}{'SIGNAL':<9}{'SECONDS':>8}")
    for place, case in cases:
        for number in (signal.SIGTERM, signal.SIGINT):
            seconds = max(measure(place, case, number) for _ in range(rounds))
            worst = max(worst, seconds)
            print(f"{place.removeprefix('mlbench_cli.'):<56}{case:<11}{number.name:<9}{seconds:>8.2f}")
    print(f"worst {worst:.2f} s of {LIMIT:g} s, over {rounds} rounds each")


def measure(place: str, case: str, number: signal.Signals) -> float:
    """Seconds from the signal to the end of the process; its exit code must be that of the signal."""
    argv = [sys.executable, "-c", PROGRAM, place, str(int(number)), case, "run", "a", "1", "--command", "sleep 0.5"]
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "MLBENCH_HOME": home, "MLBENCH_MACHINE_LOCK": "none"}
        with subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdout is not None
            sent = process.stdout.readline()
            code = process.wait()
            ended = time.time()
        time.sleep(1.0)  # the agent completes the archive in the folder that goes away now
    if not sent.startswith(b"at ") or code != 128 + number:
        raise SystemExit(f"{place}, {case}, {number.name}: exit code {code}, said {sent!r}")
    return ended - float(sent.split()[1])


if __name__ == "__main__":
    main()
