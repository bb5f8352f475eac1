"""Tests that need a GPU, and the ranks that train on it."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from mlbench_cli.tasks.catalog import load_task
from task_images.methods.catalog import find_class
from tests.contract.task_images.ranks import Ended, launch

Train = Callable[..., list[Ended]]


@pytest.fixture(autouse=True)
def _needs_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch finds no NVIDIA GPU")


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Train a task on the GPU: (task, preset, ranks, method, changed parameters) -> how the ranks ended.

    One rank has NCCL for its backend, several share the GPU by gloo. `code` is how every rank ends.
    """

    def run(
        task: str,
        preset: str = "tiny",
        ranks: int = 1,
        method: str = "",
        code: int = 0,
        device: str = "gpu",
        variables: Mapping[str, str] | None = None,
        **changes: Any,
    ) -> list[Ended]:
        own = {"MLBENCH_DEVICE": device, "MLBENCH_BACKEND": "gloo" if ranks > 1 else "nccl", **(variables or {})}
        if method:
            own["MLBENCH_METHOD"] = json.dumps({"name": method})
        folder = tmp_path / device
        folder.mkdir()
        parameters = load_task(task).resolve(preset) | changes
        servers = find_class(method)().values.get("servers", 0) if method else 0
        ended = launch(f"task_images.run {task}", ranks, folder, parameters, servers=servers, **own)
        assert [one.code for one in ended] == [code] * len(ended), "\n".join(one.stderr[-2000:] for one in ended)
        return ended

    return run
