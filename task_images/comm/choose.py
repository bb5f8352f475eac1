"""Create the strategy for the contract's method."""

from task_images.comm.base import Strategy
from task_images.comm.methods import Method, MethodError, check
from task_images.comm.presets import find_registered
from task_images.contract import Contract
from task_images.harness.errors import TaskUsageError


def read_method(contract: Contract) -> Method:
    """The run's method. Raises TaskUsageError if it is invalid."""
    try:
        method = Method.from_dict(contract.method)
        check(method, contract.world_size)
        if method.engine == "registered":
            find_registered(method)
    except (MethodError, TypeError) as error:
        raise TaskUsageError(f"MLBENCH_METHOD: {error}", getattr(error, "instead", None)) from None
    return method


def make_strategy(method: Method, seed: int = 0) -> Strategy:
    """The strategy that implements a valid method."""
    if method.engine in ("ddp", "ddp-static", "zero1", "fsdp2", "hsdp"):
        from task_images.comm.native import make_native

        return make_native(method)
    if method.engine == "registered":
        from task_images.comm.registered import RegisteredRun

        return RegisteredRun(method, find_registered(method))
    if method.transport == "gossip" or method.sync != "every":
        from task_images.comm.drifting import make_drifting

        return make_drifting(method, seed)
    if method.staleness != "sync":
        from task_images.comm.asynchronous import AsynchronousServers

        return AsynchronousServers(method)
    from task_images.comm.reducer import Reducer

    return Reducer(method, seed)
