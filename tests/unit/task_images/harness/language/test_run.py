"""A whole pretraining of one weight on one rank: its schedule, its result, and what it refuses."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from task_images.contract import Contract, parse_event
from task_images.harness.distributed import World
from task_images.harness.errors import TaskUsageError
from task_images.harness.language.layout import Memory, plan_layout
from task_images.harness.language.pretraining import Pretraining, Workload
from task_images.harness.language.sharded import ShardedUpdate
from task_images.harness.language.tokens import Batch
from task_images.harness.loop import Unit
from task_images.harness.report import Reporter
from task_images.harness.settings import PretrainingSettings

SETTINGS = replace(
    PretrainingSettings(), steps=6, warmup_steps=2, learning_rate=0.5, evaluate_every=4, global_batch=4,
    precision="fp32", goal_full=-1000.0, weight_decay=0.0, model="one",
)  # fmt: skip


class Ones(Workload[Batch]):
    """Two passes per update with a loss that falls with the weight: its gradient is 1 per term."""

    samples, tokens, updates_per_epoch = 4, 40, 3.0

    def training(self, update: int) -> Iterator[Batch]:
        for _ in range(2):
            yield Batch(torch.ones(2, 10), torch.zeros(2, 10), None, None, 40.0)

    def validation(self) -> Iterator[Batch]:
        yield Batch(torch.ones(1, 10), torch.zeros(1, 10), None, None, 10.0)

    def prepare(self, part: Batch) -> Batch:
        return part

    def forward(self, model: nn.Module, data: Batch) -> Tensor:
        loss: Tensor = model(data.inputs.reshape(-1, 1)).sum()
        return loss

    def sum_loss(self, outputs: Tensor, data: Batch) -> Tensor:
        return outputs

    def score(self, outputs: Tensor, data: Batch) -> Mapping[str, tuple[Tensor | float, float]]:
        return {"loss": (outputs / data.terms, data.terms)}


def make(
    folder: Path, layout: Any = None, variables: Mapping[str, str] | None = None, **settings: Any
) -> Pretraining[Batch]:
    contract = Contract({"MLBENCH_OUTPUT_DIR": str(folder), **(variables or {})})
    world = World(contract, torch.device("cpu"), 1, grouped=False)
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return Pretraining(
        world,
        Reporter(world, "ones"),
        replace(SETTINGS, **settings),
        layout or plan_layout("ddp", 1),
        model,
        Ones(),
        name="a_task",
        goal_metric="loss",
        parameters=1,
        passes=2,
        flops=80.0,
        flops_formula="by hand",
        memory=Memory(1, 2, 3, 4),
        identity={"seed": 42},
        unit=Unit("tokens", 10.0),
        details={"model": "one"},
    )


def run(made: Pretraining[Batch], capsys: pytest.CaptureFixture[str]) -> Any:
    made.run()
    events = [event for line in capsys.readouterr().out.splitlines() if (event := parse_event(line))]
    return events[-1]


def test_a_result_has_layout_tokens_memory_and_communication(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(make(tmp_path), capsys)
    details = result["details"]
    assert (result["outcome"], result["updates"], result["samples"]) == ("goal_missed", 6, 24)
    assert details["layout"] == {"name": "ddp", "replicas": 1, "shards": 1, "tensor": 1}
    assert (details["parameters"], details["passes_per_update"]) == (1, 2)
    assert (details["global_batch"], details["tokens_per_update"], details["model"]) == (4, 40, "one")
    assert details["data_epochs"] == 2.0
    assert details["memory"]["estimated_bytes"] == 10
    assert details["memory"]["peak_bytes"] > 1 << 20
    assert (details["communication"]["bytes_per_update"], details["communication"]["kinds"]) == (0, {})
    assert details["communication"]["updates"] == 6.0
    assert details["tokens_per_second"] == details["tokens_per_second_per_rank"] > 0
    assert details["options"]["fused_optimizer"] is True
    # Validated after updates 4 and 6; the mean of the loss is the weight, which Adam moves by its rate each time.
    assert [point["update"] for point in details["curve"]] == [4, 6]
    rates = [0.25, 0.5, *(0.5 * (0.1 + 0.9 * (1 + math.cos(math.pi * step / 4)) / 2) for step in range(4))]
    weights = [1.0]
    for rate in rates:
        weights.append(weights[-1] - rate)
    assert [point["loss"] for point in details["curve"]] == pytest.approx([weights[4], weights[6]], abs=1e-5)
    assert details["curve"][0]["train_loss"] == pytest.approx(sum(weights[:4]) / 4, abs=1e-5)


def test_a_goal_is_the_least_loss_and_ends_the_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(make(tmp_path, goal_full=0.0), capsys)
    assert (result["outcome"], result["updates"], result["goal"]["comparison"]) == ("goal_reached", 4, "<=")
    result = run(make(tmp_path, goal_full=0.0, past_goal=True), capsys)
    assert (result["outcome"], result["updates"], result["details"]["curve"][-1]["update"]) == ("goal_reached", 4, 6)


def test_a_checkpoint_resumes_with_its_position(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = run(make(tmp_path), capsys)["details"]["curve"]
    folder = tmp_path / "checkpoints"
    run(make(tmp_path, checkpoint_every=2, checkpoint_dir=str(folder)), capsys)
    assert sorted(path.name for path in folder.iterdir()) == ["step-2", "step-4", "step-6"]
    resumed = run(make(tmp_path, resume=str(folder / "step-4")), capsys)
    assert resumed["details"]["resumed"] == {"epoch": 0, "updates": 4}
    assert [point["update"] for point in resumed["details"]["curve"]] == [6]
    assert resumed["details"]["curve"][0]["loss"] == pytest.approx(whole[1]["loss"], abs=1e-6)


def test_layouts_that_exchange_gradients_themselves_take_no_method(tmp_path: Path) -> None:
    sharded = plan_layout("fsdp2", 1)
    assert isinstance(make(tmp_path, sharded)._make_strategy(), ShardedUpdate)
    for variables, option in (
        ({"MLBENCH_METHOD": '{"name": "bsp"}'}, "--method"),
        ({"MLBENCH_CALIBRATE": "1"}, "--calibrate"),
    ):
        with pytest.raises(TaskUsageError, match=f"exchanges gradients itself, so {option} has no effect") as caught:
            make(tmp_path, sharded, variables)._make_strategy()
        assert caught.value.hint == f"Leave out {option}, or --set parallel=ddp."


@pytest.mark.parametrize(("clip", "limit"), [(1.0, 1.0), (0.0, math.inf)])
def test_the_norm_is_measured_without_a_limit_too(tmp_path: Path, clip: float, limit: float) -> None:
    trainer = make(tmp_path, clip=clip).make_trainer()
    assert trainer.clip == limit
    assert trainer.graphs is None
    assert make(tmp_path, compile="graphs").make_trainer().graphs is not None
    optimizer: Any = trainer.make_optimizer(trainer.model)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.5, (0.9, 0.95), 1e-8, 0.0)
