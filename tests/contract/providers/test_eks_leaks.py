"""EKS never leaks: killed or refused at every request of making and removing a cluster, one command removes it all.

The boundaries come from the double's log of an undisturbed run. A kill comes after the request was done, before its
answer: what a kill before it leaves is what the one before has left.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from mlbench_cli.errors import CapacityError, CleanupError, CredentialError, UnreachableError
from mlbench_cli.storage.store import Store
from tests import NIGHTLY
from tests.contract.providers.eks_world import (
    LONG_PATIENCE,
    Case,
    Verified,
    forget,
    make,
    pattern,
    remove,
    together,
    warm,
)
from tests.fakes.aws_server import AwsClient

CHANGES = ("Create", "Delete", "Associate", "Update")
TRANSIENT = ("throttle", "error", "error-after", "cut", "cut-after")


@dataclass
class World:
    """A double, the log of making a cluster and of removing it, and a double in which one is made."""

    aws: AwsClient
    made: AwsClient
    making: list[str]
    removing: list[str]


@pytest.fixture(scope="module")
def world(aws_server: AwsClient, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    aws = aws_server.copy()
    forget()
    before = dict(os.environ)
    try:
        warm(aws)
        case = Case(aws, tmp_path_factory.mktemp("reference"), "ref-2")
        assert together([case.making]) == [0], case.error
        making = case.log
        made = aws.copy()
        aws.calm("ref-2")
        assert together([case.removing]) == [0], case.error
        assert case.list_left() == []
        yield World(aws, made, making, case.log)
        made.stop()
    finally:
        aws.stop()
        os.environ.clear()
        os.environ.update(before)
        forget()


@pytest.fixture(scope="module")
def verifier() -> Verified:
    return Verified()


@pytest.mark.slow
@pytest.mark.parametrize("stride", [1 if NIGHTLY else 61])
def test_killed_at_every_request_of_making(world: World, verifier: Verified, tmp_path: Path, stride: int) -> None:
    numbers = range(0, len(world.making), stride)
    cases = [Case(world.aws, tmp_path, f"kill{stride}x{number}-2") for number in numbers]
    starts = [
        (
            lambda case=case, number=number: case.start_process(
                lambda: make(case.name, case.folder / "home"), kill_at=number
            )
        )
        for number, case in zip(numbers, cases, strict=True)
    ]
    assert set(together(starts)) == {-9}
    for case in cases:
        asked = {line.split()[1] for line in case.log if ":Create" in line}
        noted = {entry.name.rpartition("/")[2] for entry in Store(case.folder / "home").journal_of(case.name)}
        assert all(any(name in asked_for for name in noted) for asked_for in asked), "asked for before it was noted"
    verifier.show(cases)


@pytest.mark.slow
@pytest.mark.parametrize("stride", [1 if NIGHTLY else 61])
def test_killed_at_every_request_of_removing(world: World, verifier: Verified, tmp_path: Path, stride: int) -> None:
    every = range(0, len(world.removing), stride)
    for first in range(0, len(every), 6):
        numbers = every[first : first + 6]
        cases = [Case(world.made.copy(), tmp_path / str(number), "ref-2") for number in numbers]
        starts = [
            (
                lambda case=case, number=number: case.start_process(
                    lambda: remove("ref-2", case.folder / "h"), kill_at=number
                )
            )
            for number, case in zip(numbers, cases, strict=True)
        ]
        for case in cases:
            case.aws.calm("ref-2")
        assert set(together(starts)) == {-9}
        verifier.show(cases)
        for case in cases:
            case.aws.stop()


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRANSIENT if NIGHTLY else ("cut-after",))
def test_passing_trouble_at_every_request_is_overcome(world: World, tmp_path: Path, kind: str) -> None:
    """Every request that is not like an earlier one fails the first time; -after: though it was done."""
    case = Case(world.aws, tmp_path, f"pass-{kind}-2").order(kind, once_each=True)
    create = partial(make, case.name, case.folder / "home", patience=LONG_PATIENCE)
    assert together([lambda: case.start_process(create)]) == [0], case.error
    assert len(set(case.log)) <= len(case.log) / 2 + 1, "hardly anything was repeated"
    case.aws.calm(case.name)
    case.order(kind, once_each=True)
    delete = partial(remove, case.name, tmp_path / "empty", LONG_PATIENCE)
    assert together([lambda: case.start_process(delete)]) == [0], case.error
    assert case.list_left() == []


@pytest.mark.slow
@pytest.mark.parametrize("stride", [1 if NIGHTLY else 23])
@pytest.mark.parametrize(("kind", "code"), [("deny", CredentialError.exit_code), ("quota", CapacityError.exit_code)])
def test_refused_at_every_request_of_making(
    world: World, verifier: Verified, tmp_path: Path, kind: str, code: int, stride: int
) -> None:
    lines = [line for line in dict.fromkeys(world.making) if kind == "deny" or any(word in line for word in CHANGES)]
    first, lines = lines[0], lines[::stride]
    cases = [Case(world.aws, tmp_path, f"{kind}{stride}x{number}-2") for number in range(len(lines))]
    for case, line in zip(cases, lines, strict=True):
        case.order(kind, action=pattern(line, "ref-2", case.name), times=1000)
    codes = dict(zip(lines, together([case.making for case in cases]), strict=True))
    # Who may not ask the auto scaling group waits for EKS to say it; without a list of versions EKS chooses its own.
    asked = (
        "autoscaling:DescribeScalingActivities",
        "autoscaling:DescribeAutoScalingGroups",
        "eks:DescribeAddonVersions",
        "eks:DescribeClusterVersions",
    )
    tolerated = {line for line in lines if line.startswith(asked)}
    assert {line: got for line, got in codes.items() if got != (0 if line in tolerated else code)} == {}
    for case, line in zip(cases, lines, strict=True):
        if line not in tolerated:
            assert "AWS refused" in case.error
            assert line == first or "mlbench delete-cluster eks" in case.error or "resources exist" not in case.error
    verifier.show(cases)


@pytest.mark.slow
@pytest.mark.parametrize("stride", [1 if NIGHTLY else 23])
def test_refused_at_every_request_of_removing(world: World, verifier: Verified, tmp_path: Path, stride: int) -> None:
    lines = list(dict.fromkeys(world.removing))[::stride]
    for first in range(0, len(lines), 6):
        some = lines[first : first + 6]
        cases = [Case(world.made.copy(), tmp_path / str(first + at), "ref-2") for at in range(len(some))]
        for case, line in zip(cases, some, strict=True):
            case.aws.calm("ref-2")
            case.order("deny", action=pattern(line, "ref-2", "ref-2"), times=1000)
        starts = [(lambda case=case: case.start_process(lambda: remove("ref-2", case.folder / "h"))) for case in cases]
        codes = together(starts)
        assert set(codes) <= {CredentialError.exit_code, CleanupError.exit_code}, dict(zip(some, codes, strict=True))
        verifier.show(cases)
        for case in cases:
            case.aws.stop()


@pytest.mark.slow
def test_no_answer_for_longer_than_patience(world: World, verifier: Verified, tmp_path: Path) -> None:
    stack = "mlbench-silent-2-workers"
    case = Case(world.aws, tmp_path, "silent-2")
    case.order("cut-after", action=f"cloudformation:CreateStack {stack}", times=1000)
    case.order("cut", action=f"cloudformation:DescribeStacks {stack}", times=1000, skip=1)
    assert together([case.making]) == [UnreachableError.exit_code]
    assert "returned no usable answer" in case.error
    assert "node group silent-2-workers (unconfirmed)" in case.error
    verifier.show([case])
