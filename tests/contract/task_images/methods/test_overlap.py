"""Gradients are sent during the backward pass, also of compiled models."""

import json
from pathlib import Path

import pytest

from tests.contract.task_images.ranks import RankServer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "asked", "compiled"),
    [
        ({"name": "ddp", "bucket": "1500kB"}, "whole", "whole"),
        pytest.param({"name": "eftopk"}, "whole", "blocks", marks=pytest.mark.nightly),
        pytest.param({"name": "wfbp"}, "whole", "blocks", marks=pytest.mark.nightly),
        pytest.param({"name": "ddp", "bucket": "1500kB"}, "no", "no", marks=pytest.mark.nightly),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else value,
)
def test_the_first_gradient_is_ready_in_the_first_quarter_of_the_backward_pass(
    ranks: RankServer, tmp_path: Path, method: dict[str, str], asked: str, compiled: str
) -> None:
    """Counted in parts of the compiled code or in layers, not in seconds."""
    variables = {"MLBENCH_METHOD": json.dumps(method)}
    ended = ranks.run("tests.contract.task_images.methods.overlap_ranks", 2, tmp_path, {"compile": asked}, **variables)
    assert [one.code for one in ended] == [0, 0], ended[0].stderr[-2000:]
    [line] = [line for line in ended[0].stdout.splitlines() if line.startswith("READY")]
    _, how, share = line.split()
    assert how == compiled
    assert float(share) <= 0.25
