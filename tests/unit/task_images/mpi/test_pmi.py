"""The process manager's answers, over a real socket and a real store, and the map of who shares memory with whom."""

import itertools
import socket
import threading

import pytest
import torch.distributed as dist

from task_images.mpi.pmi import Manager, memory_domain, process_mapping


@pytest.mark.parametrize(
    ("domains", "mapping"),
    [
        ("a", "(vector,(0,1,1))"),
        ("aaaa", "(vector,(0,1,4))"),
        ("aabbbc", "(vector,(0,1,2),(1,1,3),(2,1,1))"),
        ("aba", "(vector,(0,1,1),(1,1,1),(0,1,1))"),
    ],
)
def test_mapping(domains: str, mapping: str) -> None:
    assert process_mapping(list(domains)) == mapping


def test_mapping_says_of_every_rank_what_was_given() -> None:
    for length in range(1, 7):
        for domains in itertools.product("abc", repeat=length):
            nodes = expand(process_mapping(list(domains)))
            assert len(nodes) == length
            for (node, domain), (other, another) in itertools.combinations(zip(nodes, domains, strict=True), 2):
                assert (node == other) == (domain == another)


def expand(mapping: str) -> list[int]:
    """Rank -> node, as MPICH reads it."""
    blocks = eval(mapping.replace("vector", "'vector'"))[1:]
    return [node for first, nodes, each in blocks for node in range(first, first + nodes) for _ in range(each)]


def test_this_process_shares_memory_with_itself() -> None:
    assert memory_domain() == memory_domain()


class Library:
    """The other end of the socket: what an MPI library does with it."""

    def __init__(self, manager: Manager) -> None:
        self._socket: socket.socket = manager._library_end
        self._answers = self._socket.makefile("r")
        threading.Thread(target=manager._serve, daemon=True).start()

    def ask(self, request: str) -> str:
        self._socket.sendall(request.encode() + b"\n")
        return self._answers.readline().strip()


def test_ranks_find_each_others_values_after_a_barrier() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    managers = [Manager(store, rank, 2) for rank in range(2)]
    store.set("job", "name-of-the-job")
    for rank in range(2):
        store.set(f"domain/{rank}", "same machine")
    first, second = map(Library, managers)
    for library in (first, second):
        assert library.ask("cmd=init pmi_version=1 pmi_subversion=1").startswith("cmd=response_to_init")
        assert library.ask("cmd=get_my_kvsname") == "cmd=my_kvsname rc=0 kvsname=name-of-the-job"
        assert library.ask("cmd=get_universe_size") == "cmd=universe_size rc=0 size=2"
    assert first.ask("cmd=get kvsname=x key=PMI_process_mapping").endswith("value=(vector,(0,1,2))")
    assert first.ask("cmd=put kvsname=x key=card-0 value=a=b/c==") == "cmd=put_result rc=0"
    assert second.ask("cmd=get kvsname=x key=card-1").startswith("cmd=get_result rc=-1")

    came: list[str] = []
    waiting = threading.Thread(target=lambda: came.append(second.ask("cmd=barrier_in")))
    waiting.start()
    assert first.ask("cmd=barrier_in") == "cmd=barrier_out rc=0"
    waiting.join(120)
    assert came == ["cmd=barrier_out rc=0"]
    assert second.ask("cmd=get kvsname=x key=card-0") == "cmd=get_result rc=0 value=a=b/c=="
    assert first.ask("cmd=spawn nprocs=1") == "cmd=spawn_result rc=-1 msg=unknown"
    assert first.ask("cmd=finalize") == "cmd=finalize_ack rc=0"
