"""A program for test_overlap.py: how much of a backward pass has run when the first gradient is ready."""

import torch
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from task_images.contract import Contract
from task_images.methods.catalog import read_method
from task_images.run import run
from task_images.speed import choose_compile
from task_images.world import open_world

WIDTH, LAYERS = 512, 12  # a layer has 1 MB of gradients
UPDATES = 3  # DistributedDataParallel has its final buckets after the first


class Counter:
    """Counts the parts of backward passes that have run: layers, or those of compiled code, which it takes as it is."""

    def __init__(self) -> None:
        self.done = 0

    def count(self) -> None:
        self.done += 1

    def compile_backward(self, graph: torch.fx.GraphModule, inputs: object) -> object:
        def call(*values: object) -> object:
            found = graph(*values)
            self.count()
            return found

        return make_boxed_func(call)


class Stack(nn.Sequential):
    """With a forward pass of its own: torch 2.11 does not compile that of a bare nn.Sequential."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self:
            x = part(x)
        return x


def main(contract: Contract) -> None:
    world = open_world(contract, rendezvous_seconds=60)
    counter = Counter()
    backend = aot_autograd(
        fw_compiler=lambda graph, inputs: make_boxed_func(graph), bw_compiler=counter.compile_backward
    )
    model = Stack(*(Stack(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)))
    compiled = choose_compile(contract.parameters["compile"], contract)
    for layer in model:
        if compiled == "no":
            layer.register_full_backward_hook(lambda *_: counter.count())
        elif compiled == "blocks":
            layer.compile(fullgraph=True, backend=backend)
    if compiled == "whole":
        model.compile(fullgraph=True, backend=backend)
    method = read_method(contract)
    module = method.attach(world, model, lambda net: torch.optim.SGD(net.parameters(), 0.1))
    ready: list[int] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: ready.append(counter.done))  # type: ignore[no-untyped-call]
    for _ in range(UPDATES):
        ready.clear()
        counter.done = 0
        method.begin(1.0, float(world.size))
        module(torch.randn(2, WIDTH)).sum().backward()
        method.step(0.1)
    print("READY", compiled, ready[0] / counter.done, flush=True)
    method.close()
    world.close()


if __name__ == "__main__":
    run(main)
