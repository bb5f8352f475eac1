"""What a run is, in one phrase, as following it begins with."""

from typing import Any

import pytest

from mlbench_cli.commands._report import in_words, run_in_words
from mlbench_cli.model.spec import RunSpec

RUN = {
    "task": "digits_resnet", "preset": "spec", "cluster": "local", "workers": 2, "world_size": 2, "backend": "gloo",
    "device": "cpu",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "digits_resnet on local, 2 workers, gloo, cpu"),
        ({"preset": "tiny"}, "digits_resnet (tiny) on local, 2 workers, gloo, cpu"),
        ({"workers": 1, "world_size": 1}, "digits_resnet on local, 1 worker, gloo, cpu"),
        ({"world_size": 4}, "digits_resnet on local, 2 workers of 2 ranks, gloo, cpu"),
        ({"task": "custom", "preset": "custom"}, "a command on local, 2 workers, gloo, cpu"),
        ({"cluster": "gke-4", "backend": "nccl", "device": "gpu"}, "digits_resnet on gke-4, 2 workers, nccl, gpu"),
    ],
)
def test_a_run_in_words(changes: dict[str, Any], words: str) -> None:
    assert run_in_words({**RUN, **changes}) == words


def test_a_spec_is_told_as_its_run_is() -> None:
    spec = RunSpec("x-2", "local", "local", "digits_resnet", "spec", ("true",), "gloo", 2, processes_per_worker=3)
    assert in_words(spec) == "digits_resnet on local, 2 workers of 3 ranks, gloo, cpu"
