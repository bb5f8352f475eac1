"""Speed options: what is compiled, and that they are told as they are."""

import pytest
import torch
from torch import nn

from task_images.harness.models.imagenet import imagenet_model
from task_images.harness.models.resnet import resnet
from task_images.harness.speed import SpeedOptions, blocks_of

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


def test_no_block_is_left_uncompiled_for_being_one_of_many() -> None:
    """Real compilations, by a compiler that takes the code as it is: more of them than torch's own limit."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.linear = nn.Linear(width, width + 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).relu()

    seen: list[int] = []

    def compiler(graph: torch.fx.GraphModule, inputs: object) -> object:
        seen.append(1)
        return graph.forward

    model = nn.ModuleDict({"blocks": nn.Sequential(*(Block(width) for width in range(1, 12)))})
    torch._dynamo.reset()
    SpeedOptions(False, "blocks", "fp32", 0).apply(model)
    for block in model["blocks"]:
        block.compile(backend=compiler, dynamic=False)
    model["blocks"](torch.ones(2, 1))
    assert len(seen) == 11
    torch._dynamo.reset()


def test_channels_last_and_the_list_for_the_result() -> None:
    model = resnet(8)
    options = SpeedOptions(True, "no", "fp16", 3)
    options.apply(model)
    assert model.stem[0].weight.is_contiguous(memory_format=torch.channels_last)
    facts = options.facts(options.make_precision(CPU))
    # fp16 is for GPUs: what was used is said, not what was asked for.
    assert facts == {
        "channels_last": True,
        "compile": "no",
        "precision": "fp32",
        "loaders": 3,
        "fused_optimizer": True,
        "gradients": "views into one buffer per collective",
    }
