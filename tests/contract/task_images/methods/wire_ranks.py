"""A program for test_wire_bytes.py: what a rank has sent by its own count, and by the kernel's, for each method."""

import json
import os
import socket
import stat
import struct
from contextlib import suppress

from torch import Tensor, nn, ones, optim

from task_images.contract import Contract
from task_images.methods import FILES
from task_images.methods.base import Method, MethodError
from task_images.methods.catalog import find_class, read_method
from task_images.run import run
from task_images.world import World, open_world

UPDATES = 4  # one average of localsgd and slowmo, and both phases of those that have two
WIDTHS = (600, 800, 1000)
EARLY = {"diloco": {"steps": "2"}, "onebit-adam": {"warmup_steps": "2"}}
# struct tcp_info (linux/tcp.h): bytes_sent and bytes_retrans, which are in it since Linux 4.19
SENT, SENT_AGAIN = 200, 208


def count_sent() -> int:
    """Bytes that this process has handed to TCP, by the kernel's counters of its open connections."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not stat.S_ISSOCK(os.stat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                sent, again = (struct.unpack_from("Q", info, place)[0] for place in (SENT, SENT_AGAIN))
                total += sent - again
    return total


class Wide(nn.Module):
    """Matrices that are large beside what a message costs besides its numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(300, width) for width in WIDTHS)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = sum(layer(inputs).square().mean() for layer in self.layers)
        return found


def measure(world: World, method: Method) -> tuple[float, float | None]:
    """Bytes that this rank has sent in all updates: by the kernel, and by the method; None if it does not say."""
    make = optim.SGD if method.optimizers == ("SGD",) else optim.AdamW
    module = method.attach(world, Wide(), lambda net: make(net.parameters(), 0.001))
    world.barrier()  # what was handed over before has been sent
    before, counted = count_sent(), method.stats().get("wire_bytes")
    for _ in range(UPDATES):
        method.begin(1.0, float(world.size))
        module(ones(2, 300)).backward()
        method.step(0.001)
    if method.gates:  # the last update is under way
        with method.consensus():
            pass
    world.barrier()
    found = count_sent() - before
    if counted is not None:
        counted = method.stats()["wire_bytes"] - counted
    method.close()
    return float(found), counted


def list_methods(contract: Contract, size: int) -> list[Method]:
    """The one with servers that this start is of, or all without; of these only some, if the parameters name them."""
    if contract.method:
        return [read_method(contract)]
    found = []
    for name in contract.parameters.get("methods", FILES):
        method = find_class(name)(**EARLY.get(name, {}))
        with suppress(MethodError):
            method.check(size)
            if "servers" not in method.values:
                found.append(method)
    return found


def main(contract: Contract) -> None:
    world = open_world(contract, rendezvous_seconds=60)
    for method in list_methods(contract, world.size):
        print("WIRE", json.dumps([method.name, *measure(world, method)]), flush=True)
        world.barrier()
    world.close()


if __name__ == "__main__":
    run(main)
