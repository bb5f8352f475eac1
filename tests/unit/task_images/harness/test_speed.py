"""Speed options: what is compiled, and that they are told as they are."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import nn

from task_images.comm.allreduce import GradientAllReduce
from task_images.contract import Contract
from task_images.harness.data import ArrayData
from task_images.harness.distributed import open_world
from task_images.harness.errors import TaskUsageError
from task_images.harness.loop import Plan
from task_images.harness.metrics import TopK
from task_images.harness.models.imagenet import imagenet_model
from task_images.harness.models.resnet import resnet
from task_images.harness.precision import refuse_bf16_lstm, set_arithmetic
from task_images.harness.report import Reporter
from task_images.harness.schedules import Constant, PerUpdate
from task_images.harness.settings import CudaSettings
from task_images.harness.speed import SpeedOptions, blocks_of
from task_images.harness.training import make_sample_trainer

CPU = torch.device("cpu")


@pytest.mark.parametrize(("name", "blocks"), [("resnet50", 16), ("vgg11_bn", 5), ("densenet121", 61)])
def test_blocks_are_what_the_model_is_a_sequence_of(name: str, blocks: int) -> None:
    with torch.device("meta"):
        assert len(blocks_of(imagenet_model(name, width=0.125))) == blocks


@pytest.mark.parametrize(("word", "compiled"), [("no", 0), ("blocks", 9), ("whole", 1)])
def test_what_is_compiled(word: str, compiled: int) -> None:
    model = resnet(20)
    SpeedOptions(False, word, "fp32", 0).apply(model)
    assert sum(module._compiled_call_impl is not None for module in model.modules()) == compiled


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


CompiledModel = Callable[[int, int], tuple[nn.Module, list[str]]]


@pytest.fixture
def make_compiled() -> Iterator[CompiledModel]:
    """A model of compiled blocks (first and last width), and what has been compiled so far. The compilations are real,
    by a compiler that takes the code as it is."""
    torch._dynamo.reset()
    seen: list[str] = []

    def compiler(graph: torch.fx.GraphModule, inputs: object) -> object:
        seen.append(str(graph.graph))
        return graph.forward

    def make(first: int, last: int) -> tuple[nn.Module, list[str]]:
        blocks = nn.Sequential(*(Block(width) for width in range(first, last)))
        model = nn.Sequential(blocks)
        SpeedOptions(False, "blocks", "fp32", 0).apply(model)
        for block in blocks:
            block.compile(backend=compiler)
        return model, seen

    yield make
    torch._dynamo.reset()


def test_no_block_is_left_uncompiled_for_being_one_of_many(make_compiled: CompiledModel) -> None:
    """More of them than torch's own limit."""
    model, seen = make_compiled(2, 13)
    model(torch.ones(2, 2))
    assert len(seen) == 11


def test_odd_batches_and_validation_compile_nothing_more(make_compiled: CompiledModel) -> None:
    """Three batches an epoch, the last of which is smaller, then validation."""
    model, seen = make_compiled(4, 7)
    world = open_world(Contract({"OMP_NUM_THREADS": "1"}))
    samples = (np.ones((19, 4), np.float32), np.arange(19) % 3)
    make_sample_trainer(
        world, Reporter(world, "ones", synthetic=True), ArrayData(world, samples, samples, 8, 1), model,
        nn.functional.cross_entropy, lambda model: torch.optim.SGD(model.parameters(), 0.01),
        PerUpdate(Constant(0.01)), Plan(2), strategy=GradientAllReduce(), metrics=[TopK(1)], compiled=True,
    ).run()  # fmt: skip
    assert len(seen) == 3


def test_channels_last_and_the_list_for_the_result() -> None:
    model = resnet(8)
    options = SpeedOptions(True, "no", "fp16", 3)
    options.apply(model)
    assert model.get_parameter("stem.0.weight").is_contiguous(memory_format=torch.channels_last)
    assert options.facts() == {"channels_last": True, "compile": "no", "loaders": 3}
    # fp16 is for GPUs: what was used is reported, not what was asked for.
    assert options.make_precision(CPU).used == "fp32"


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
    with pytest.raises(TaskUsageError, match="in fp16 when bf16 is asked for"):
        refuse_bf16_lstm("bf16", torch.device("cuda"))
