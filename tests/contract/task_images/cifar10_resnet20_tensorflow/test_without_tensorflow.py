"""What the TensorFlow task does before TensorFlow is asked: meeting, data, settings, and what is said without it."""

import importlib.util
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from mlbench_cli.agent.machine import free_port
from mlbench_cli.tasks.catalog import load_task
from task_images.cifar10_resnet20.data import Cifar
from task_images.cifar10_resnet20_tensorflow.task import PADDING, Images, cut, meet, rendezvous
from task_images.contract import Contract, PeerLostError
from task_images.images import synthetic_images
from tests.contract.task_images.ranks import ROOT, launch

NAME = "cifar10_resnet20_tensorflow"


def contract(rank: int, size: int, port: int, **more: str) -> Contract:
    given = {"RANK": rank, "WORLD_SIZE": size, "NODE_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return Contract({**{name: str(value) for name, value in given.items()}, **more})


def test_every_rank_learns_where_all_others_listen() -> None:
    port = free_port()
    with ThreadPoolExecutor(3) as pool:
        late = [pool.submit(rendezvous, contract(rank, 3, port), 7000 + rank, 30.0) for rank in (2, 1)]
        first = pool.submit(rendezvous, contract(0, 3, port), 7000, 30.0)
        assert {tuple(one.result()) for one in (first, *late)} == {
            ("127.0.0.1:7000", "127.0.0.1:7001", "127.0.0.1:7002")
        }


def test_ranks_may_keep_their_connections_to_rank_0() -> None:
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        late = [pool.submit(meet, contract(rank, 3, port), 7000 + rank, 30.0) for rank in (2, 1)]
        _, links = meet(contract(0, 3, port), 7000, 30.0)
        assert sorted(links) == [1, 2]
        for rank, other in zip((2, 1), late, strict=True):
            [(peer, link)] = other.result()[1].items()
            assert peer == 0
            with link, links[rank]:
                links[rank].sendall(str(rank).encode())
                assert link.recv(10) == str(rank).encode()


def test_workers_are_found_by_their_names() -> None:
    port, hosts = free_port(), "a.example,localhost"
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(rendezvous, contract(rank, 2, port, MLBENCH_HOSTS=hosts), 7000, 30.0) for rank in (0, 1)]
        assert [one.result() for one in found] == [["a.example:7000", "127.0.0.1:7000"]] * 2


def test_strangers_do_not_disturb_and_a_missing_rank_is_named() -> None:
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(rendezvous, contract(0, 3, port), 7000, 2.0)
        for words in (b"GET / HTTP/1.0\r\n\r\n\n", b"[]\n", b"9 x\n"):
            while True:
                try:
                    stranger = socket.create_connection(("127.0.0.1", port))
                    break
                except ConnectionRefusedError:
                    continue
            with stranger:
                stranger.sendall(words)
                stranger.shutdown(socket.SHUT_WR)
                assert stranger.recv(10) == b""
        second = pool.submit(rendezvous, contract(1, 3, port), 7001, 2.0)
        with pytest.raises(PeerLostError, match="rank 2 did not connect within 2 s"):
            first.result()
        with pytest.raises(PeerLostError, match="rank 0 did not answer"):
            second.result()


def test_every_image_is_seen_once_per_epoch_by_one_rank() -> None:
    training, validation = (synthetic_images(size, 10, 32, 1, part) for size, part in ((50, "a"), (21, "b")))
    labels = np.arange(50)
    images = Cifar((training[0], labels), validation)
    ranks = [Images(images, 8, rank, 3, seed=1, loaders=0) for rank in range(3)]
    for epoch in (1, 2):
        batches = [list(one.training(epoch)) for one in ranks]
        assert [len(found) for found in batches] == [ranks[0].steps] * 3 == [2] * 3
        seen = [int(label) for found in batches for batch in found for label in batch.labels]
        assert sorted(seen) == list(range(50))
        assert [sum(len(found[step].labels) for found in batches) for step in range(2)] == [24, 26]
    assert [len(batch.labels) for one in ranks for batch in one.validation()] == [7, 7, 7]
    first = next(iter(ranks[0].validation()))
    np.testing.assert_array_equal(first.images, validation[0][:7].transpose(0, 2, 3, 1))


def test_crops_are_parts_of_the_padded_image_mirrored_or_not() -> None:
    images, _ = synthetic_images(4, 10, 32, 1, "x")
    offsets = np.array([[[0], [4], [8], [3]], [[8], [4], [0], [5]]])
    mirrored = np.array([[False], [False], [True], [True]])
    found = cut(images, offsets, mirrored)
    np.testing.assert_array_equal(found[1], images[1].transpose(1, 2, 0))
    for number in range(4):
        padded = np.pad(images[number], ((0, 0), (PADDING,) * 2, (PADDING,) * 2))
        down, across = offsets[:, number, 0]
        part = padded[:, down : down + 32, across : across + 32].transpose(1, 2, 0)
        np.testing.assert_array_equal(found[number], part[:, ::-1] if mirrored[number, 0] else part)


def test_nothing_of_it_needs_torch() -> None:
    names = ("run", "report", "clock", f"{NAME}.task")
    code = (
        "import sys; " + "; ".join(f"import task_images.{name}" for name in names) + "; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_parameter_server_is_not_for_gpus(tmp_path: Path) -> None:
    served = load_task(NAME).resolve("tiny", {"strategy": "parameter-server"})
    (ended,) = launch(f"task_images.run {NAME}", 1, tmp_path, served, MLBENCH_BACKEND="grpc", MLBENCH_DEVICE="gpu")
    assert ended.code == 64
    assert ended.stderr.splitlines() == [
        "rank 0: the strategy parameter-server is for CPUs",
        "rank 0: Leave out --gpu, or --set strategy=collective.",
    ]


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is not None, reason="TensorFlow is installed here")
def test_without_tensorflow_it_says_how_to_get_it(tmp_path: Path) -> None:
    (ended,) = launch(f"task_images.run {NAME}", 1, tmp_path, load_task(NAME).resolve("tiny"), MLBENCH_BACKEND="grpc")
    assert ended.code == 78
    assert "pip install '.[tensorflow]'" in ended.stderr
    assert "Traceback" not in ended.stderr
