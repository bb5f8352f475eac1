"""Runs with more than ranks that talk by gloo: MPI without a launcher, and parameter servers; on Slurm and on hosts."""

import pytest

from tests.e2e.machines.fleet import Client
from tests.needs import needs


@pytest.fixture(params=["slurm", "hosts"])
def machines(request: pytest.FixtureRequest) -> Client:
    client: Client = request.getfixturevalue(request.param)
    return client


def test_ranks_of_mpi_find_each_other_without_a_launcher(machines: Client) -> None:
    needs("mpi4py")
    machines.ok("run", "mpi", "2", "--task", "allreduce", "--preset", "tiny", "--backend", "mpi", "--yes")
    machines.ok("verify", str(machines.folder("mpi-2")))
    result = machines.result("mpi-2")
    assert (result["outcome"], result["backend"]) == ("completed", "mpi")


def test_parameter_servers_run_beside_the_workers(machines: Client) -> None:
    words = ["--task", "digits_resnet", "--preset", "tiny", "--method", "bsp-ps", "--set", "run.servers=2", "--yes"]
    machines.ok("run", "ps", "2", *words)
    machines.ok("verify", str(machines.folder("ps-2")))
    for server, log in enumerate(machines.folder("ps-2") / f"logs/rank-{rank}.log" for rank in (2, 3)):
        assert f"parameter server {server}: all 2 trainers are done" in log.read_text()
    observation = machines.observation("ps-2")
    assert [worker["exit_code"] for worker in observation["workers"]] == [0, 0, 0, 0]
    nodes = [worker["node"] for worker in observation["workers"]]
    assert nodes[:2] == nodes[2:]
