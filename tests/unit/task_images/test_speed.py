"""Speed options: what is compiled, and that they are recorded as they are."""

import numpy as np
import pytest
import torch
from torch import nn

from task_images.classification import train_classifier
from task_images.contract import Contract, EnvironmentUnfitError, TaskUsageError, parse_event
from task_images.data import ArrayData
from task_images.methods.base import Bsp, Method
from task_images.metrics import TopK
from task_images.parameters import CudaSettings, LongClassifierSettings, SpeedSettings
from task_images.report import Reporter
from task_images.resnet import resnet
from task_images.schedules import Constant, PerUpdate
from task_images.speed import apply_speed, require_compiler
from task_images.train import Plan, Precision, Samples, Trainer, refuse_bf16_lstm, set_arithmetic
from task_images.world import open_world

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


def train_images(word: str, method: Method, backend: object = None) -> tuple[nn.Module, list[float]]:
    """A small network after six updates, two of them on smaller batches, and its losses in validation."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    model, world = nn.Sequential(*layers), open_world(Contract({"OMP_NUM_THREADS": "1"}))
    options = SpeedSettings(compile=word)
    losses: list[float] = []
    apply_speed(options, model)
    if backend is not None:
        model.compile(backend=backend)
    samples = (np.random.default_rng(1).normal(size=(22, 3, 8, 8)).astype(np.float32), np.arange(22) % 10)
    data = ArrayData(world, samples, samples, 8, 1)
    work = Samples(data, world, model, nn.functional.cross_entropy, [TopK(1)], compiled=word != "no")
    trainer = Trainer(
        world, Reporter(world, "noise", synthetic=True), work, PerUpdate(Constant(0.1)), Plan(2),
        validate=work.validate, method=method,
        make_optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
        compile=word,
    )  # fmt: skip
    trainer.after_validation = lambda epoch, values: losses.append(values["loss"])
    trainer.run()
    return model, losses


@pytest.mark.nightly
def test_graphs_train_alike_and_are_not_claimed_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    """By torch's own compiler. Every pass is announced."""
    from torch._inductor.cudagraph_trees import MarkStepBox  # torch's compiler takes 2 s of a core to import

    _, losses = train_images("no", Bsp())
    before = MarkStepBox.mark_step_counter
    _, found = train_images("graphs", Bsp())
    assert before - MarkStepBox.mark_step_counter == 6
    assert found == pytest.approx(losses, rel=1e-4)
    events = (parse_event(line) for line in capsys.readouterr().out.splitlines())
    options = [event["details"]["options"] for event in events if event and event["event"] == "result"]
    assert [one.get("cuda_graphs") for one in options] == [None, False]


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"MLBENCH_METHOD": '{"name": "dear"}'}, "this method uses its layers"),
        ({"MLBENCH_METHOD": '{"name": "fsdp2"}'}, "this method uses its layers"),
    ],
    ids=["no barrier", "shards"],
)
def test_graphs_refuse_what_needs_single_layers(variables: dict[str, str], why: str) -> None:
    world = open_world(Contract({"OMP_NUM_THREADS": "1", **variables}))
    data = ArrayData(world, (np.ones((8, 4), np.float32), np.arange(8) % 3), (np.ones((1, 4)), np.zeros(1)), 8, 1)
    with pytest.raises(TaskUsageError, match=why):
        train_classifier(
            world, Reporter(world, "ones"), LongClassifierSettings(compile="graphs"), nn.Linear(4, 3), data,
            PerUpdate(Constant(0.1)),
        )  # fmt: skip


def test_channels_last_and_fp16_on_a_cpu() -> None:
    model = resnet(8)
    options = SpeedSettings()
    apply_speed(options, model)
    assert model.get_parameter("stem.0.weight").is_contiguous(memory_format=torch.channels_last)
    # fp16 is for GPUs: what was used is reported, not what was asked for.
    assert Precision("fp16", CPU).used == "fp32"


@pytest.mark.parametrize(("tf32", "kind"), [(False, "ieee"), (True, "tf32")])
def test_fp32_is_fp32_unless_tf32_is_asked_for(tf32: bool, kind: str) -> None:
    backends = torch.backends
    try:
        set_arithmetic(CudaSettings(tf32=tf32, cudnn="benchmark"))
        places = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)  # type: ignore[attr-defined]
        assert [place.fp32_precision for place in places] == [kind] * 3
        assert (backends.cudnn.benchmark, backends.cudnn.deterministic) == (True, False)
    finally:
        set_arithmetic(CudaSettings())
    with pytest.raises(TaskUsageError, match="cudnn"):
        set_arithmetic(CudaSettings(cudnn="fastest"))


def test_lstms_in_bf16_are_refused_on_gpus_only() -> None:
    refuse_bf16_lstm("bf16", CPU)
    refuse_bf16_lstm("fp16", torch.device("cuda"))
    with pytest.raises(TaskUsageError, match="in fp16 if bf16 is requested"):
        refuse_bf16_lstm("bf16", torch.device("cuda"))


def test_compiling_without_a_compiler_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(EnvironmentUnfitError, match=r"install g\+\+ .* --set compile=no"):
        require_compiler("whole")
