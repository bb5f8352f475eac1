"""--method, run.servers and --set comm.OPTION=VALUE: what they mean, and what is refused before anything starts."""

from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from mlbench_cli.engines.local.engine import LocalEngine
from mlbench_cli.engines.plan import contract_environment
from mlbench_cli.errors import UsageError
from mlbench_cli.model.run import LOCAL, Cluster
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.results.archive.judge import find_division
from mlbench_cli.runs.launch import Machine, resolve
from mlbench_cli.runs.request import Request
from mlbench_cli.tasks.catalog import find_rules

TEXT = {"data": "python-topics"}
BIG = Machine(cores=16, gpus=0)


def spec(workers: int = 2, cluster: Cluster = LOCAL, **options: Any) -> RunSpec:
    request = Request(name="x", workers=(workers,), **{"task": "digits_resnet", **options})
    return resolve(request, cluster, BIG if cluster is LOCAL else None)[0]


def test_the_tasks_own_method_leaves_the_spec_and_its_hash_as_they_were() -> None:
    plain = spec()
    assert spec(method="bsp") == plain
    assert "MLBENCH_METHOD" not in contract_environment(plain, "localhost", "127.0.0.1", "1")


def test_another_method_is_in_the_spec_the_environment_and_the_division() -> None:
    found = spec(method="eftopk", set={"comm.density": 0.5, "depth": 8})
    assert found.method["name"] == "eftopk"
    assert found.method["density"] == "0.5"
    assert found.parameters["depth"] == 8
    assert RunSpec.from_dict(found.to_dict()) == found
    environment = contract_environment(found, "localhost", "127.0.0.1", "1")
    assert '"density":"0.5"' in environment["MLBENCH_METHOD"]
    division = find_division(
        replace(found, parameters=spec().parameters), find_rules("digits_resnet", "spec"), False, None
    )
    assert division.word == "open"
    assert "method eftopk" in str(division.reason)


def test_one_option_alone_changes_the_tasks_own_method() -> None:
    assert spec(set={"comm.delay": "0.001,1e-9"}).method == {"name": "bsp", "delay": "0.001,1e-9"}
    assert spec(set={"comm.delay": "none"}).method == {}


def test_servers_are_processes_after_the_ranks() -> None:
    found = spec(method="bsp-ps", servers=2)
    assert (found.world_size, found.servers, found.process_count) == (2, 2, 4)
    [plan] = LocalEngine().render(found).documents
    assert plan["environment"]["WORLD_SIZE"] == "2"
    assert plan["environment"]["MLBENCH_SERVERS"] == "2"
    assert [rank["environment"].get("MLBENCH_ROLE") for rank in plan["ranks"]] == [None, None, "server", "server"]
    assert [rank["environment"]["RANK"] for rank in plan["ranks"]] == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"method": "topkk"}, 'no method "topkk". Did you mean "topk"', "mlbench methods"),
        ({"set": {"comm.dela": "all"}}, 'has no option "dela". Did you mean "delay"', "mlbench methods bsp"),
        ({"method": "topk", "set": {"comm.density": "2"}}, "comm.density is '2'", "comm.density=0.01"),
        ({"method": "topk", "set": {"comm.rank": "2"}}, 'has no option "rank"', "mlbench methods topk"),
        ({"method": "fusion", "set": {"comm.bucket": "big"}}, "comm.bucket is 'big'", "comm.bucket=25MiB"),
        ({"method": "fusion", "servers": 1}, "has no parameter servers", "mlbench methods fusion"),
        ({"method": "bsp-ps", "servers": 3}, "more servers than workers", "--set run.servers=2"),
        ({"method": "bsp-ps", "servers": -1}, "comm.servers is '-1'", "comm.servers=1"),
        ({"method": "hsdp"}, "cannot divide 2 ranks into 2 groups", "--method fsdp2"),
        ({"task": "allreduce", "method": "bsp"}, "does not support methods", "Tasks that support them: "),
        ({"task": "wikitext2_awd_lstm", "method": "dear", "set": TEXT}, "gradients by their norm", "--method bsp"),
        ({"task": "wikitext2_awd_lstm", "method": "fsdp2", "set": TEXT}, "calls parts of its model", "--method bsp"),
        ({"task": None, "command": "python x.py", "method": "bsp"}, "not with your own command", None),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(options: Mapping[str, Any], message: str, hint: str | None) -> None:
    with pytest.raises(UsageError) as error:
        spec(**options)
    assert message in error.value.message
    assert hint is None or hint in (error.value.hint or "")


def test_shards_on_gpus_are_refused_with_gloo() -> None:
    with pytest.raises(UsageError, match="gloo cannot do on GPUs") as error:
        spec(cluster=Cluster("far", "kind"), method="fsdp2", gpu=True, gpus_per_worker=1, backend="gloo")
    assert "--backend nccl" in (error.value.hint or "")


def test_a_network_of_a_formula_is_a_delay_of_the_method() -> None:
    """0.3 ms a message, and 8 ns a byte at 1 Gbit/s; the spec keeps the words, so that the result says them."""
    found = spec(network="model:1gbit,300us")
    assert found.network == "model:1gbit,300us"
    assert found.method["delay"] == "0.0003,8e-09"
    [plan] = LocalEngine().render(found).documents
    assert "network" not in plan
    assert plan["environment"]["MASTER_ADDR"] == "127.0.0.1"
