"""Which nodes still answer, and whether they can be measured at once."""

from typing import Any, cast

from task_images.certify.task import Member, Ranks
from task_images.contract import Contract


def test_a_node_answers_as_long_as_all_of_its_ranks_do_and_those_of_one_machine_take_turns() -> None:
    ranks = Ranks(Contract({"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2"}))
    for rank, machine in enumerate("aabbbb"):
        ranks.members[rank] = Member(cast("Any", None), "address", rank // 2, machine, None, 0.0)
    assert ranks.take_turns()
    assert ranks.nodes() == {0: [0, 1], 1: [2, 3], 2: [4, 5]}
    ranks.silent.add(3)
    assert ranks.nodes() == {0: [0, 1], 2: [4, 5]}
    assert ranks.nodes(without=[0]) == {2: [4, 5]}
    assert not ranks.take_turns()
