"""What comes before a training with a method: its self-check, and when that begins."""

import json
import subprocess
import sys

import pytest
import torch

from task_images.comm import prepare
from task_images.comm.allreduce import GradientAllReduce
from task_images.comm.methods import Method
from task_images.comm.presets import resolve
from task_images.comm.selfcheck import Checked
from task_images.contract import Contract
from task_images.harness.distributed import World


def test_the_self_check_waits_for_ranks_that_still_load_their_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its collectives give up after minutes, and unpacking a data set may take hours."""
    done: list[str] = []

    def check_method(world: World, method: Method) -> Checked:
        done.append(f"checked {method.name}")
        return Checked("exact")

    world = World(
        Contract({"MLBENCH_METHOD": json.dumps(resolve("fusion").to_dict())}), torch.device("cpu"), 1, grouped=False
    )
    monkeypatch.setattr(world, "await_loading", lambda: done.append("loaded"))
    monkeypatch.setattr(prepare, "check_method", check_method)
    strategy = prepare.prepare_strategy(world, GradientAllReduce)
    assert strategy.checked["sums"] == "exact"
    assert done == ["loaded", "checked fusion"]


@pytest.mark.nightly
def test_what_torchs_engines_load_is_loaded_before_the_self_check() -> None:
    """Two seconds of a core, which were counted as the self-check's."""
    code = "\n".join(
        [
            "import sys, torch",
            "from task_images.comm.choose import make_strategy",
            "from task_images.comm.presets import resolve",
            "assert 'torch._dynamo' not in sys.modules",
            "make_strategy(resolve('fusion'))",
            "assert 'torch._dynamo' not in sys.modules",
            "make_strategy(resolve('ddp'))",
            "assert 'torch._dynamo' in sys.modules",
        ]
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
