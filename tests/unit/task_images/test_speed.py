"""Speed options: what is compiled, and that they are recorded as they are."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.cudagraph_trees import MarkStepBox

from task_images.classification import train_classifier
from task_images.contract import Contract, parse_event
from task_images.data import ArrayData
from task_images.errors import EnvironmentUnfitError, TaskUsageError
from task_images.loop import Plan
from task_images.methods.allreduce import Bsp
from task_images.methods.base import Method
from task_images.methods.ddp import Ddp
from task_images.methods.scheduled import Fusion
from task_images.metrics import TopK
from task_images.models.imagenet import imagenet_model
from task_images.models.resnet import resnet
from task_images.parameters import CheckpointedSettings, CudaSettings, SpeedSettings
from task_images.precision import refuse_bf16_lstm, set_arithmetic
from task_images.report import Reporter
from task_images.schedules import Constant, PerUpdate
from task_images.speed import Graphs, apply_speed, blocks_of, make_precision, require_compiler
from task_images.train import make_sample_trainer
from task_images.world import open_world

CPU = torch.device("cpu")


@pytest.mark.parametrize(("name", "blocks"), [("resnet50", 16), ("vgg11_bn", 5), ("densenet121", 61)])
def test_blocks_are_what_the_model_is_a_sequence_of(name: str, blocks: int) -> None:
    with torch.device("meta"):
        assert len(blocks_of(imagenet_model(name, width=0.125))) == blocks


@pytest.mark.parametrize(("word", "compiled"), [("no", 0), ("blocks", 9), ("whole", 1), ("graphs", 1)])
def test_what_is_compiled(word: str, compiled: int) -> None:
    model = resnet(20)
    apply_speed(SpeedSettings(channels_last=False, compile=word), model)
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
        apply_speed(SpeedSettings(channels_last=False, compile="blocks"), model)
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
        PerUpdate(Constant(0.01)), Plan(2), method=Bsp(), metrics=[TopK(1)], compiled=True,
    ).run()  # fmt: skip
    assert len(seen) == 3


def make_graph_memory(graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., object]:
    """Code whose outputs are always in the same memory, as those of a CUDA graph are: the next call overwrites them."""
    kept: list[torch.Tensor] = []

    def replay(given: list[object]) -> list[object]:
        outputs = list(graph(*given))
        given.clear()
        if not kept:
            kept.extend(item.detach().clone() for item in outputs if isinstance(item, torch.Tensor))
        places = iter(kept)
        return [_alias(next(places), item) if isinstance(item, torch.Tensor) else item for item in outputs]

    replay._boxed_call = True  # type: ignore[attr-defined]  # it takes its arguments in a list
    return replay


def _alias(place: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    place.copy_(value)
    return place.as_strided(place.size(), place.stride())


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
    trainer = make_sample_trainer(
        world, Reporter(world, "noise", synthetic=True), ArrayData(world, samples, samples, 8, 1), model,
        nn.functional.cross_entropy, lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
        PerUpdate(Constant(0.1)), Plan(2), method=method, metrics=[TopK(1)], compiled=word != "no",
        graphs=Graphs() if word == "graphs" else None,
    )  # fmt: skip
    trainer.after_validation = lambda epoch, values: losses.append(values["loss"])
    trainer.run()
    return model, losses


@pytest.mark.parametrize("make_method", [Bsp, Ddp, Fusion])
def test_gradients_do_not_stay_in_the_memory_of_a_graph(make_method: Callable[[], Method]) -> None:
    """A compiler on the CPU that reuses its memory stands for the GPU."""
    backend = aot_autograd(fw_compiler=make_graph_memory, bw_compiler=make_graph_memory)
    plain, losses = train_images("no", make_method())
    model, found = train_images("graphs", make_method(), backend)
    assert found == pytest.approx(losses, rel=1e-5)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.nightly
def test_graphs_train_alike_and_are_not_claimed_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    """By torch's own compiler. Every pass is announced."""
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
            world, Reporter(world, "ones"), CheckpointedSettings(compile="graphs"), nn.Linear(4, 3), data,
            PerUpdate(Constant(0.1)),
        )  # fmt: skip


def test_channels_last_and_fp16_on_a_cpu() -> None:
    model = resnet(8)
    options = SpeedSettings()
    apply_speed(options, model)
    assert model.get_parameter("stem.0.weight").is_contiguous(memory_format=torch.channels_last)
    # fp16 is for GPUs: what was used is reported, not what was asked for.
    assert make_precision("fp16", CPU).used == "fp32"


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
