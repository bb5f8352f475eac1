"""Which of torch's engines a method gets, with which settings, and how one rank trains with them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from task_images.comm import native
from task_images.comm.native import make_native
from task_images.comm.presets import resolve
from tests.unit.task_images.comm.threads import ThreadWorld, run_ranks


@pytest.fixture(autouse=True)
def imported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is imported when an engine is made, without the seconds that it takes."""
    found: list[str] = []
    monkeypatch.setattr(native, "importlib", SimpleNamespace(import_module=found.append))
    return found


@pytest.mark.parametrize("name", ["ddp", "ddp-static", "zero1", "fsdp2", "hsdp"])
def test_one_rank_trains_as_with_its_optimizer_alone(name: str) -> None:
    def body(world: ThreadWorld) -> Any:
        strategy = make_native(resolve(name))
        model = nn.Linear(2, 1, bias=False)
        nn.init.ones_(model.weight)
        assert strategy.attach(world, model, lambda net: torch.optim.SGD(net.parameters(), 1.0)) is model
        assert strategy.keeps_optimizer_state
        strategy.begin(3.0, 4.0, 2 if name != "ddp-static" else 1)
        with strategy.last_pass():
            model(torch.tensor([[4.0, 8.0]])).backward()
        strategy.step(0.5)
        state = strategy.state_dict()
        strategy.load_state_dict(state)
        assert strategy.check_replicas() is None
        return model.weight.tolist(), strategy.bucket_bytes(), strategy.stats(), strategy.method_state(), set(state)

    [(weights, sizes, figures, method, state)] = run_ranks(1, body)
    assert weights == [[1 - 0.5 * 0.75 * 4, 1 - 0.5 * 0.75 * 8]]
    assert (sizes, method) == ([], {})
    assert figures == {"updates": 1.0, "messages": 0.0, "bytes": 0.0}
    assert state == {"model", "optimizer", "method"}


# --- DistributedDataParallel ----------------------------------------------------------------------------------------
