"""A program for test_servers.py: trainers and parameter servers, each printing OK when what is asked for holds."""

import time
from dataclasses import replace

from task_images.comm.base import Strategy
from task_images.comm.choose import make_strategy, read_method
from task_images.comm.methods import Method
from task_images.comm.selfcheck import check_method
from task_images.contract import Contract
from task_images.harness.distributed import World, open_world
from task_images.harness.entry import run
from task_images.harness.precision import LossScale
from tests.contract.task_images.comm.training import MeanByHand, compare, train


def main(contract: Contract) -> None:
    world = open_world(contract, rendezvous_seconds=60)
    method = read_method(contract)
    check_method(world, method)
    print("OK self-check", flush=True)
    if contract.parameters.get("endless"):
        train(world, make_strategy(method), updates=10**9)
    if method.staleness == "sync":
        expected, _ = train(world, make_peer(method), 5)
        model, strategy = train(world, make_strategy(method), 5)
        compare(world, model, expected, method.name)
        strategy.close()
    else:
        keep_the_bound(world)
    print("OK training", flush=True)
    world.close()


def make_peer(method: Method) -> Strategy:
    """Without servers, what the training has to equal: the mean by hand, or the same codec over an all-gather."""
    if method.codec == "none":
        return MeanByHand()
    return make_strategy(replace(method, transport="allgather", servers="0", partition="none"))


def keep_the_bound(world: World) -> None:
    """One trainer is slower than the other, which runs ahead as far as it may and no further."""
    method = read_method(world.contract)
    strategy = make_strategy(method)
    if world.rank == 1:
        begin = strategy.begin

        def begin_late(weight: float, total: float, passes: int = 1, scale: LossScale | None = None) -> None:
            time.sleep(0.03)
            begin(weight, total, passes, scale)

        strategy.begin = begin_late  # type: ignore[method-assign]
    train(world, strategy, 12)
    ahead = world.max([strategy.stats()["most_updates_ahead"]])[0]
    word, _, bound = method.staleness.partition(":")
    assert ahead >= 1, ahead
    assert word == "async" or ahead <= int(bound), ahead


if __name__ == "__main__":
    run(main)
