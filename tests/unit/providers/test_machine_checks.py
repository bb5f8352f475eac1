"""Which machine a catalog chooses, which numbers beside it are refused, and what a quota error says."""

from dataclasses import dataclass
from typing import Any

import pytest

from mlbench_cli.errors import MlbenchError, UsageError
from providers.machine_checks import (
    GpuCatalog,
    Shortage,
    check_count,
    check_forced,
    describe_gpus,
    make_quota_error,
    require_vcpus,
    settle_gpus,
)


@dataclass(frozen=True)
class Machine:
    """A type of machine of no cloud."""

    name: str
    gpu: str | None = None
    gpus: int = 0
    vcpus: int | None = None


TABLE = (
    Machine("big", "nvidia-h100-80gb", 8, 96),
    Machine("large", "nvidia-tesla-t4", 1, 8),
    Machine("small", "nvidia-tesla-t4", 1, 4),
    Machine("four", "nvidia-tesla-t4", 4, 32),
    Machine("pair", "h100-nvl", 2, 40),
)
CATALOG = GpuCatalog("Cloud", {machine.name: machine for machine in TABLE}, {"t4": "nvidia-tesla-t4"}, ("k80",))


@pytest.mark.parametrize("name", ["t4", "T4", "nvidia-tesla-t4", "NVIDIA-TESLA-T4", "nvidia-t4", "tesla-t4"])
def test_a_gpu_may_be_named_as_the_cloud_or_as_people_do(name: str) -> None:
    assert CATALOG.find_gpu(name) == "nvidia-tesla-t4"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("k80", "k80 is too old"),
        ("nvidia-tesla-K80", "k80 is too old"),
        ("a100", 'Cloud has no GPU "a100"'),
        ("t44", "Did you mean"),
    ],
)
def test_gpus_that_the_cloud_does_not_have(name: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        CATALOG.find_gpu(name)
    assert says in caught.value.message
    assert caught.value.hint == "Available GPUs: nvidia-h100-80gb, nvidia-tesla-t4, h100-nvl"


@pytest.mark.parametrize(("count", "name"), [(None, "small"), (1, "small"), (4, "four")])
def test_the_smallest_machine_with_as_many_gpus(count: int | None, name: str) -> None:
    assert CATALOG.choose_smallest("nvidia-tesla-t4", count).name == name


def test_a_number_of_gpus_that_no_machine_has_names_those_that_are_there() -> None:
    with pytest.raises(UsageError, match=r"No machine has 2 × nvidia-tesla-t4; there are some with 1 or 4\.") as caught:
        CATALOG.choose_smallest("nvidia-tesla-t4", 2)
    assert caught.value.hint == "Machines with nvidia-tesla-t4: large (1), small (1), four (4)"
    with pytest.raises(UsageError, match=r"there are some with 8\.") as other:
        CATALOG.choose_smallest("nvidia-h100-80gb", 2)
    assert other.value.hint == "With 2: --gpu-type h100-nvl"  # the same model, another variant


@pytest.mark.parametrize(
    ("number", "gpu", "says", "hint"),
    [
        (4, None, "large has 1 × nvidia-tesla-t4, not 4; machines are sold whole", "--machine-type four, or leave out"),
        (3, None, "not 3", "Leave out --num-gpus."),
        (1, "h100-nvl", "large has nvidia-tesla-t4, not h100-nvl", "Machines with h100-nvl: pair (2)"),
    ],
)
def test_a_machine_that_does_not_have_what_was_asked_for(number: int, gpu: str | None, says: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        CATALOG.require_gpus(TABLE[1], number, gpu)
    assert says in caught.value.message
    assert str(caught.value.hint).startswith(hint)
    assert (
        CATALOG.require_gpus(TABLE[1], 1, "nvidia-tesla-t4") == CATALOG.require_gpus(TABLE[1], None, None) == TABLE[1]
    )


@pytest.mark.parametrize(
    ("machine", "told", "options", "settled"),
    [
        (Machine("m", "t4", 2), None, {}, ("t4", 2)),
        (Machine("m", "t4", 2), ("l4", 1), {}, ("l4", 1)),
        (Machine("m", "t4", 2), (None, 1), {}, ("t4", 1)),
        (Machine("m", "t4", 2), ("l4", 0), {}, (None, 0)),
        (Machine("m", "t4", 0), ("l4", 0), {"forced": 4}, ("l4", 4)),
        (Machine("m"), None, {"asked": 0}, (None, 0)),
        (Machine("m", "t4", 2), None, {"asked": 2, "is_gpu_family": True}, ("t4", 2)),
    ],
)
def test_what_the_cloud_tells_goes_before_the_table_and_the_user_before_both(
    machine: Machine, told: Any, options: dict[str, Any], settled: tuple[str | None, int]
) -> None:
    found = settle_gpus(machine, told, **{"forced": None, "asked": None, "is_gpu_family": False, **options})
    assert (found.gpu, found.gpus, found.name) == (*settled, "m")


@pytest.mark.parametrize(
    ("machine", "told", "options", "says"),
    [
        (Machine("m"), None, {"forced": 1}, "The GPU type of m is unknown"),
        (Machine("m", "t4"), ("t4", 0), {"is_gpu_family": True}, "their number is unknown"),
        (Machine("m", "t4", 1), None, {"asked": 2}, "A m has 1 GPU, not 2"),
        (Machine("m", "t4", 2), None, {"asked": 0}, "A m has 2 GPUs, not 0"),
    ],
)
def test_gpus_that_are_unknown_or_others_than_asked_for(
    machine: Machine, told: Any, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        settle_gpus(machine, told, **{"forced": None, "asked": None, "is_gpu_family": False, **options})


@pytest.mark.parametrize(("gpus", "is_allowed"), [(None, True), (0, False), (1, True), (64, True), (65, False)])
def test_a_machine_has_1_to_64_gpus(gpus: int | None, is_allowed: bool) -> None:
    if is_allowed:
        check_forced(gpus)
    else:
        with pytest.raises(UsageError, match=f"--gpus-per-node {gpus}: from 1 to 64"):
            check_forced(gpus)


def test_no_gpus_may_be_asked_for_but_not_fewer() -> None:
    check_count(None)
    check_count(0)
    with pytest.raises(UsageError, match="--num-gpus -1: the minimum is 0"):
        check_count(-1)


@pytest.mark.parametrize(
    ("vcpus", "asked", "is_enough"),
    [(8, 8, True), (8, 9, False), (8, None, True), (None, 99, True), (0, 99, True)],
)
def test_a_machine_with_unknown_vcpus_is_taken(vcpus: int | None, asked: int | None, is_enough: bool) -> None:
    machine = Machine("m", vcpus=vcpus)
    if is_enough:
        assert require_vcpus(machine, asked) is machine
    else:
        with pytest.raises(UsageError, match="m has 8 vCPUs, not 9"):
            require_vcpus(machine, asked)


def test_a_quota_error_names_every_quota_and_details_the_first() -> None:
    lacking = [Shortage("CPUS", 1.0, 8.0, 4, " vCPUs"), Shortage("GPUS", 0.5, 0.5, 1)]
    error: MlbenchError = make_quota_error("here", lacking, "ask for more")
    assert error.message == (
        "The quota of here is too small: CPUS has 1 of 8 vCPUs left, 4 needed; GPUS has 0.5 of 0.5 left, 1 needed."
    )
    assert error.details == {"reason": "quota", "quota": "CPUS", "left": 1.0, "needed": 4}
    assert error.hint == "ask for more"


def test_gpus_are_described_by_number_and_type() -> None:
    assert [describe_gpus(machine) for machine in (TABLE[0], Machine("m"))] == ["8 × nvidia-h100-80gb", "no GPU"]
