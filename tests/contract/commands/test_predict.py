"""`mlbench predict` on the published archives, whose measurements are the reference."""

import math
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from mlbench_cli.app import run
from mlbench_cli.errors import UsageError
from mlbench_cli.predict.cost import collective_cost
from mlbench_cli.predict.machines import find_gpu, find_machine, require_measured
from mlbench_cli.predict.model import Link, Measured, measure
from mlbench_cli.predict.model import predict as forecast
from mlbench_cli.results.archive.files import Archive
from providers.machines import load_prices
from tests.contract.clients import answer

Captured = pytest.CaptureFixture[str]
ARCHIVES = Path(__file__).parents[3] / "results" / "archives"


def paths(kind: str) -> list[str]:
    found = sorted(str(path) for path in ARCHIVES.glob(f"{kind}-r?.zip"))
    assert found
    return found


def measured_update(kind: str) -> float:
    """Seconds of an update without validation, as the runs reported."""
    seconds = []
    for path in paths(kind):
        with Archive.open(Path(path)) as archive:
            result: Any = archive.result
            phases = {name: value["mean"] for name, value in result["timings"].items()}
            seconds.append((sum(phases.values()) - phases["validation"]) / result["updates"])
    return fmean(seconds)


def predict(capsys: Captured, *words: str) -> list[dict[str, Any]]:
    return answer(capsys, "predict", *words)["predictions"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("method", ["bsp", "eftopk"])
def test_a_run_on_one_network_predicts_the_same_method_on_another(capsys: Captured, method: str) -> None:
    (found,) = predict(capsys, *paths(f"net-{method}-1gbit-2"), "--network", "100mbit")
    # The interval is what a prediction promises; the figure itself is as good as the machine was quiet.
    assert found["low_seconds"] < measured_update(f"net-{method}-100mbit-2") < found["high_seconds"]
    assert found["low_seconds"] * found["high_seconds"] == pytest.approx(found["update_seconds"] ** 2)
    assert (found["method"], found["workers"], found["basis"]) == (method, 2, "scaled")


def test_the_setting_of_a_run_is_what_it_measured(capsys: Captured) -> None:
    (found,) = predict(capsys, *paths("net-bsp-1gbit-2"))
    assert found["update_seconds"] == pytest.approx(measured_update("net-bsp-1gbit-2"), rel=1e-6)
    assert found["basis"] == "measured"


def test_workers_add_throughput_and_prices_are_those_asked_for(capsys: Captured) -> None:
    two, eight = predict(
        capsys, *paths("net-bsp-1gbit-2"), "--workers", "2,8", "--network", "10gbit,50us", "--worker-hour", "2"
    )
    assert two["samples_per_second"] < eight["samples_per_second"]
    assert eight["global_batch"] == 512
    assert (two["is_lower_bound"], eight["is_lower_bound"]) == (False, True)
    assert eight["price_usd"] == pytest.approx(8 * 2 * eight["seconds_to_goal"] / 3600)
    (free,) = predict(capsys, *paths("net-bsp-1gbit-2"), "--worker-hour", "0")
    assert free["price_usd"] == 0
    updates = [each["seconds_to_goal"] / each["update_seconds"] for each in (two, eight)]
    assert updates[0] == pytest.approx(4 * updates[1])  # as many samples, in batches that are four times as large


def test_a_fixed_global_batch_is_shared_by_the_workers() -> None:
    with Archive.open(Path(paths("net-bsp-1gbit-2")[0])) as archive:
        spec = {**archive.run["spec"], "parameters": {**archive.run["spec"]["parameters"], "global_batch": 128}}
        run_of_two = measure({**archive.run, "spec": spec}, archive.result, archive.environment)
    two, eight = (forecast([run_of_two], workers, Link(1e10, 1e-4)) for workers in (2, 8))
    assert two.global_batch == eight.global_batch
    assert two.computing_seconds == pytest.approx(4 * eight.computing_seconds)


def measured(**network: float) -> Measured:
    with Archive.open(Path(paths("net-bsp-1gbit-2")[0])) as archive:
        return measure(
            archive.run, {**archive.result, **({"network": network} if network else {})}, archive.environment
        )


def test_what_a_run_hid_on_its_own_network_is_hidden_there_again() -> None:
    one = measured()._replace(exposed=0.3, hidden=0.1)
    assert forecast([one], 2, one.link).exposed_seconds == pytest.approx(0.3)


def test_of_two_sizes_that_are_as_near_the_larger_one_tells_more() -> None:
    one, four = (measured()._replace(ranks=ranks) for ranks in (1, 4))
    assert forecast([one, four], 2).basis == "scaled"


def test_the_rate_of_a_network_is_that_of_all_links_at_once() -> None:
    link = measured(alone_bits_per_second=1e9, together_bits_per_second=6e8, rtt_seconds=1e-4).link
    assert link == Link(6e8, 1e-4)


def test_a_machine_of_several_regions_has_its_lowest_price() -> None:
    table = load_prices("eks")
    known = [price for region in table.list_regions() if (price := table.price("p3.2xlarge", region)) is not None]
    assert min(known) < max(known)
    assert find_machine("eks/p3.2xlarge").price == min(known)


def test_a_gpu_is_not_taken_for_one_whose_name_begins_its_own() -> None:
    names = {"NVIDIA A10": "a10", "NVIDIA A10G": "a10g", "NVIDIA A100-SXM4-40GB": "a100-40gb", "NVIDIA L40S": "l40s"}
    assert {name: gpu.key if (gpu := find_gpu(name)) else None for name in names} == names


@pytest.mark.parametrize(("machine", "price"), [("eks/g4dn.xlarge", 0.526), ("aks/Standard_NC8as_T4_v3", 0.752)])
def test_machines_with_the_gpu_of_the_runs_have_their_list_price(machine: str, price: float) -> None:
    """A run on a T4 tells how fast any machine with a T4 computes, and nothing about others."""
    (path, *_) = paths("digits-bsp-2")
    with Archive.open(Path(path)) as archive:
        environment: Any = {"ranks": {"0": {"device_name": "Tesla T4"}}}
        on_t4 = measure(archive.run, {**archive.result, "device": "cuda"}, environment)
        on_cpu = measure(archive.run, archive.result, archive.environment)
    found = find_machine(machine)
    require_measured(found, [on_t4])
    assert found.price == pytest.approx(price, rel=0.05)
    for other, run_there in [(found, on_cpu), (find_machine("gke/a3-highgpu-8g"), on_t4)]:
        with pytest.raises(UsageError, match="says nothing about"):
            require_measured(other, [run_there])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["digits-ddp-2"], "inside the backward pass"),
        (["sums-2"], "what an update took"),
        (["digits-bsp-2", "--workers", "0"], "--workers"),
        (["digits-bsp-2", "--workers", "two"], "not a list of numbers"),
        (["digits-bsp-2", "--on", "n1-standard-5"], "Did you mean"),
        (["digits-bsp-2", "--on", "gke/a3-highgpu-8g"], "says nothing about"),
        (["digits-bsp-2", "--on", "gke/n1-standard-8"], "computed on CPUs, which says nothing about"),
        (["digits-alone-1", "--workers", "4"], "No network was measured"),
    ],
)
def test_what_runs_do_not_tell_is_refused(capsys: Captured, words: list[str], told: str) -> None:
    assert run(["predict", *paths(words[0]), *words[1:]]) == 2
    assert told in capsys.readouterr().err


def test_messages_cost_what_the_papers_say() -> None:
    """Ring all-reduce (Patarasuk and Yuan 2009), gTop-k (Shi et al. 2019), and s servers that k workers share."""
    for k in (2, 3, 8, 64):
        assert collective_cost("allreduce", k) == (2 * (k - 1), 2 * (k - 1) / k)
        assert collective_cost("allgather", k) == (k - 1, k - 1)
    assert collective_cost("gtopk", 8) == (2 * math.log2(8), 6)
    assert collective_cost("ps", 8, servers=2) == (2, 8)
    assert collective_cost("allreduce", 1) == collective_cost("none", 8) == (0, 0)
