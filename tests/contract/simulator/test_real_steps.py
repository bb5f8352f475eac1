"""Predicted steps against real ones: gloo and parameter servers over a shaped network, by each method without loss.

Nightly only: it compares times, and the other tests of `make test` would disturb them. The network is so slow that
messages take most of a step. The layers wait instead of computing. Everything is measured in the same ranks; nothing is
fitted.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlbench_cli.simulator.step import UNKNOWN_ENGINES
from task_images.comm.methods import Method
from task_images.comm.presets import PRESETS, resolve

ROOT = Path(__file__).parents[3]
NETWORK = "50mbit,10ms"
SMALL = ("--scale", "0.25", "--steps", "2")  # 60 ms of computation, 1 MB of gradients
LINE = re.compile(r"^(\S+) +measured +([\d.]+) ms +predicted +([\d.]+) ms", re.MULTILINE)
SLOW = (pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(900))
MAX_ERROR = 0.4  # quiet machines: 15 %, see docs/figures.md
TRIES = 6  # a busy machine may not keep a network's round trip for a moment; one without the means never does


def is_lossless(method: Method) -> bool:
    """Whether every update is the exact mean of all gradients; and there is a model of it."""
    exact = (method.codec, method.sync, method.staleness) == ("none", "every", "sync")
    return (
        exact
        and method.transport in ("allreduce", "rsag", "ps")
        and method.engine not in (*UNKNOWN_ENGINES, "registered")
    )


LOSSLESS = [name for name in PRESETS if is_lossless(resolve(name))]


def test_methods_without_loss_are_those_that_are_known() -> None:
    ours = {"single", "bsp", "wfbp", "fusion", "mgwfbp", "optfusion", "bytescheduler", "dear"}
    assert set(LOSSLESS) == ours | {"bsp-ps", "wfbp-ps", "bytescheduler-ps", "ddp", "ddp-static"}


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        pytest.param(2, ["bsp", "wfbp", "wfbp-ps"], marks=SLOW, id="2 ranks, some"),
        pytest.param(2, LOSSLESS, marks=SLOW, id="2 ranks, all"),
        pytest.param(4, LOSSLESS, marks=SLOW, id="4 ranks, all"),
    ],
)
def test_steps_take_what_is_predicted(ranks: int, names: list[str]) -> None:
    words = [sys.executable, "-m", "benchmarks.predict", "--ranks", str(ranks), *SMALL]
    for _ in range(TRIES):
        done = subprocess.run(
            [*words, "--methods", ",".join(["noop", *names]), NETWORK], cwd=ROOT, capture_output=True, text=True
        )
        found = {name: (float(measured), float(predicted)) for name, measured, predicted in LINE.findall(done.stdout)}
        is_refused = not found and "ranks, " in done.stdout and not done.stderr
        if not is_refused:
            break
    else:
        pytest.skip(done.stdout)  # this machine cannot make such a network
    assert set(found) == set(names), done.stderr
    errors = {name: predicted / measured - 1 for name, (measured, predicted) in found.items()}
    assert {name: error for name, error in errors.items() if abs(error) > MAX_ERROR} == {}, done.stdout
