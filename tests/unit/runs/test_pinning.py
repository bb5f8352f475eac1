"""run.pin: what it changes in a spec, and what is refused."""

import pytest
from msgspec.structs import replace

from mlbench_cli.errors import UsageError
from mlbench_cli.model.run import LOCAL, Cluster
from mlbench_cli.runs.launch import Machine, resolve
from mlbench_cli.runs.request import Request

MACHINE = Machine(cores=4, gpus=0)
DIGITS = Request(name="run", workers=(1,), task="digits_resnet")


def test_ranks_are_bound_where_the_tool_starts_them_and_never_more_than_there_are_cpus() -> None:
    [plain] = resolve(DIGITS, LOCAL, MACHINE)
    [bound] = resolve(replace(DIGITS, pin=True), LOCAL, MACHINE)
    assert (plain.pin, bound.pin) == (False, True)
    assert plain.hash != bound.hash
    with pytest.raises(UsageError, match="this machine has 1") as error:
        resolve(replace(DIGITS, pin=True, workers=(2,)), LOCAL, Machine(cores=1, gpus=0))
    assert error.value.exit_code == 2
    assert "remove --set run.pin" in (error.value.hint or "")
    with pytest.raises(UsageError, match="binds ranks itself"):
        resolve(replace(DIGITS, pin=True, registry="ghcr.io/me"), Cluster("far", "kind"), MACHINE)
