"""Clients that are forked from the process of the tests, whatever else that process is doing."""

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
