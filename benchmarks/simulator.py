"""How long the simulator takes for a step of BERT-Large on many ranks, method by method.

    python -m benchmarks.simulator [RANKS ...]

The computation is the published rate of one GPU, the network a ring of 10 microseconds a hop and 100 Gbit/s. Prints
one line per number of ranks and method: the predicted step, and the seconds that the prediction took. The exit code is
1 if one of 1 024 ranks or fewer took more than 2 s.
"""

import sys
import time
from collections.abc import Sequence

from mlbench_cli.simulator.collectives import RingCollectives
from mlbench_cli.simulator.models import MODELS, workload_of
from mlbench_cli.simulator.published import find_single_rate
from mlbench_cli.simulator.step import simulate_step
from task_images.comm.presets import resolve

MODEL, BATCH = "BERT-Large", 8
METHODS = ("bsp", "wfbp", "mgwfbp", "optfusion", "bytescheduler", "dear", "bsp-ps")
HOP, GBITS = 10e-6, 100.0
MAX_SECONDS, MAX_RANKS = 2.0, 1024


def main(arguments: Sequence[str]) -> int:
    """Predict and time; the exit code."""
    workload = workload_of(MODELS[MODEL](), BATCH / find_single_rate(MODEL))
    is_slow = False
    for ranks in map(int, arguments or ("1024", "10000")):
        for name in METHODS:
            begun = time.perf_counter()
            step = simulate_step(workload, resolve(name), RingCollectives(ranks, HOP, 8 / (GBITS * 1e9)), servers=ranks)
            taken = time.perf_counter() - begun
            is_slow |= ranks <= MAX_RANKS and taken > MAX_SECONDS
            print(f"{MODEL} on {ranks:>6} ranks, {name:<14} {step.seconds:7.3f} s a step, predicted in {taken:.2f} s")
    return int(is_slow)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
