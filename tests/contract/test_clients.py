"""Clients that are forked from the process of the tests, whatever else that process is doing."""

import gc
import os
import weakref
from concurrent.futures import ThreadPoolExecutor

import grpc

from tests.contract import clients

FORKS = 12  # of which one in three was aborted by gRPC's threads


def test_a_client_of_a_process_that_uses_grpc_is_not_aborted() -> None:
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            grpc.channel_ready_future(channel).result(timeout=60)
            ended = [clients.finish("tasks", "mnist") for _ in range(FORKS)]
        server.stop(None).wait()
    assert [done.returncode for done in ended] == [0] * FORKS


class Cycle:
    """Garbage that only a search finds."""

    def __init__(self) -> None:
        self.itself = self


def test_a_fork_does_not_collect_what_it_has_inherited() -> None:
    gc.disable()
    try:
        inherited = weakref.ref(Cycle())
        child = os.fork()
        if child == 0:
            own = weakref.ref(Cycle())
            gc.collect()
            os._exit(0 if inherited() is not None and own() is None else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        gc.enable()
