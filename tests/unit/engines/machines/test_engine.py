"""Parts that engines of machines share: answers of several hosts, runs of others, and plans of agents."""

import pytest
from msgspec.structs import replace

from mlbench_cli.engines.placement import NodeShare, share_nodes
from mlbench_cli.engines.plan import make_plan
from mlbench_cli.model.cluster_details import MachineDetails
from mlbench_cli.model.spec import RunSpec

SPEC = RunSpec("x-3", "c", "hosts", "custom", "custom", ("true",), "gloo", 3)

DETAILS = MachineDetails(folder="/f", python="/opt/python", interface="ib0", env={"A": "details", "B": "details"})


@pytest.mark.parametrize(
    ("preset", "launcher", "only"), [("tiny", (), True), ("tiny", ("apptainer",), False), ("custom", (), False)]
)
def test_a_task_of_the_catalog_runs_only_installed_code_unless_it_is_in_a_container(
    preset: str, launcher: tuple[str, ...], only: bool
) -> None:
    spec = replace(SPEC, task="mnist", preset=preset)
    assert make_plan(spec, DETAILS, share_nodes(spec), lock="take", launcher=launcher)["installed_code_only"] is only


def test_agents_get_the_variables_of_the_run_and_time_for_nodes_that_may_be_absent() -> None:
    spec = replace(SPEC, env={"A": "run"}, absent_seconds=900.0)
    plan = make_plan(spec, DETAILS, share_nodes(spec), lock="take")
    assert (plan["environment"]["A"], plan["environment"]["B"]) == ("run", "details")
    assert plan["meeting_seconds"] > 900


SHRINKING = replace(SPEC, on_failure="shrink", workers=4, parameters={"batch_size": 3})
TWO = [NodeShare((0, 1)), NodeShare((2, 3))]
ONE_EACH = [NodeShare((worker,)) for worker in range(4)]


@pytest.mark.parametrize(
    ("faults", "nodes"),
    [
        ("at 9s node 2 gone", ONE_EACH),  # 12 samples for 3 ranks
        ("at 9s node 2 gone; at 19s node 1 gone", ONE_EACH),  # then 2
        ("at 9s node 2 gone", TWO),  # both workers of the machine
        ("at 9s kill rank 0", TWO),
        (None, TWO),
    ],
)
def test_a_run_that_shrinks_to_a_whole_share_of_its_batch_is_planned(
    faults: str | None, nodes: list[NodeShare]
) -> None:
    make_plan(replace(SHRINKING, faults=faults), DETAILS, nodes, lock="take")
