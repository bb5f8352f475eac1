"""The map of who shares memory with whom; tests/contract/task_images/methods/test_mpi.py starts real ranks."""

import itertools

from task_images.mpi.pmi import process_mapping


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
