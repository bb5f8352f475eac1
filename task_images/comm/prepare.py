"""The first step of a training: choose the method, and check it before the clock starts."""

import time
from collections.abc import Callable

from task_images.comm.base import Strategy
from task_images.comm.choose import make_strategy, read_method
from task_images.comm.selfcheck import check_method
from task_images.harness.distributed import World


def prepare_strategy(world: World, own: Callable[[], Strategy]) -> Strategy:
    """The strategy of the run's method after its self-check, or the task's `own`. Collective.

    Rank 0's log and the result say which method was used and what was compared. The check starts after all ranks have
    loaded their data, because its collectives have a shorter timeout. Raises TaskUsageError for an invalid method, and
    MethodWrongError for one that computes a wrong result.
    """
    contract = world.contract
    if not contract.method:
        if world.is_first:
            print("method: the task's own", flush=True)
        return own()
    method = read_method(contract)
    strategy = make_strategy(method, contract.seed)
    world.await_loading()
    begin = time.perf_counter()
    found = check_method(world, method)
    if world.is_first:
        print(
            f"method: {method.name}; its self-check passed in {time.perf_counter() - begin:.2f} s"
            f" ({found.updates} updates, largest error of sums {found.error:g}); {found}",
            flush=True,
        )
    strategy.checked = found.to_dict()
    return strategy
