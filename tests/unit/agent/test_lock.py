"""The lock of a machine: who gets it, what it says of its holder, and the order in which a run takes several.

The order is the same for all runs, or two of them wait for ever.
"""

from itertools import permutations

from mlbench_cli.agent.lock import order_nodes

MACHINES = ("boot-a:1:7", "boot-b:1:7", "boot-c:1:7")


def test_all_runs_take_the_locks_of_the_same_machines_in_the_same_order() -> None:
    """Whatever numbers the machines have in a run. By number, A, B of one run would meet B, A of another."""
    for machines in permutations(MACHINES):
        taken = [machines[node] for node in order_nodes(dict(enumerate(machines)))]
        assert taken == sorted(MACHINES)


def test_of_several_nodes_of_one_machine_the_first_takes_the_lock() -> None:
    assert order_nodes({2: "b", 0: "c", 1: "b", 3: "a"}) == [3, 1, 0]


def test_a_node_with_nothing_to_lock_has_no_turn() -> None:
    assert order_nodes({0: None, 1: "a", 2: None}) == [1]
    assert order_nodes({}) == []
