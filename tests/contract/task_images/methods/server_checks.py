"""A program for test_servers.py: trainers and parameter servers, each printing OK when what is asked for holds."""

from task_images.contract import Contract
from task_images.methods.catalog import read_method
from task_images.methods.check import check_method
from task_images.run import run
from task_images.world import open_world
from tests.contract.task_images.methods.training import MeanByHand, compare, train


def main(contract: Contract) -> None:
    world = open_world(contract, rendezvous_seconds=60)
    check_method(world, read_method(contract))
    print("OK self-check", flush=True)
    if contract.parameters.get("endless"):
        train(world, read_method(contract), updates=10**9)
    expected, _ = train(world, MeanByHand(), 5)
    model, method = train(world, read_method(contract), 5)
    compare(world, model, expected, method.name)
    method.close()
    print("OK training", flush=True)
    world.close()


if __name__ == "__main__":
    run(main)
