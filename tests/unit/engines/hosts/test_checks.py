"""What hosts must have in common, and at which address they are reached."""

import time
from dataclasses import replace

import pytest

from mlbench_cli.engines.hosts.checks import (
    HostFacts,
    check_hosts,
    choose_address,
    examine_hosts,
)
from mlbench_cli.engines.hosts.hostfile import HostEntry
from mlbench_cli.errors import CapacityError, NotFoundError, UsageError

ADDRESSES = [
    {"interface": "lo", "address": "127.0.0.1", "mask": "255.0.0.0"},
    {"interface": "eth0", "address": "10.0.0.5", "mask": "255.255.255.0"},
    {"interface": "ib0", "address": "172.16.0.5", "mask": "255.255.0.0"},
]
HOST = HostFacts(
    "m1", {"writable": True, "free_bytes": 9 << 30, "home": "/root"}, 0.0, "3.11.7", "2.11.0", 0, "eth0", "10.0.0.5", ()
)


@pytest.mark.parametrize(
    ("connection", "interface", "chosen"),
    [
        ("1.2.3.4 5000 10.0.0.5 22", None, ("eth0", "10.0.0.5")),
        ("1.2.3.4 5000 10.0.0.5 22", "ib0", ("ib0", "172.16.0.5")),
        ("127.0.0.1 5000 127.0.0.11 2222", None, ("lo", "127.0.0.11")),
        ("127.0.0.1 5000 127.0.0.11 2222", "lo", ("lo", "127.0.0.11")),
        ("1.2.3.4 5000 203.0.113.9 22", None, ("eth0", "10.0.0.5")),  # behind an address translation
        ("", None, ("eth0", "10.0.0.5")),
    ],
)
def test_ranks_meet_at_the_address_that_ssh_came_to(
    connection: str, interface: str | None, chosen: tuple[str, str]
) -> None:
    assert choose_address(ADDRESSES, connection, interface, "m1") == chosen


def test_an_unknown_interface_is_refused_with_those_that_exist() -> None:
    with pytest.raises(NotFoundError, match="lo, eth0, ib0"):
        choose_address(ADDRESSES, "", "eth9", "m1")


class Host:
    """A channel to a host whose clock says `now`."""

    def __init__(self, now: float) -> None:
        self.now = now

    def call(self, do: str, **_: object) -> dict[str, object]:
        if do == "probe":
            return {"python": "3.11.7", "torch": "2.11.0", "gpus": "8", "packages": []}
        return {**HOST.facts, "time": self.now, "addresses": ADDRESSES, "connection": "1.2.3.4 5000 10.0.0.5 22"}


def test_the_clock_of_a_host_is_compared_with_the_middle_of_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter((1000.0, 1004.0))
    monkeypatch.setattr(time, "time", lambda: next(moments))
    [found] = examine_hosts([HostEntry("me@m1")], [Host(1102.0)], "/d", "python3", None)  # type: ignore[list-item]
    assert found.clock_seconds == 100.0
    assert (found.name, found.gpus, found.interface, found.address) == ("m1", 8, "eth0", "10.0.0.5")


def test_different_versions_and_full_disks_are_refused() -> None:
    with pytest.raises(UsageError, match="m2 has none"):
        check_hosts([HOST, replace(HOST, name="m2", torch=None)], "/d")
    with pytest.raises(UsageError, match="versions of Python"):
        check_hosts([HOST, replace(HOST, name="m2", python="3.12.0")], "/d")
    with pytest.raises(CapacityError):
        check_hosts([replace(HOST, facts={**HOST.facts, "free_bytes": 1 << 20})], "/d")


def test_clocks_that_differ_and_little_disk_are_worth_a_warning() -> None:
    other = replace(HOST, name="m2", clock_seconds=60.0, facts={**HOST.facts, "free_bytes": 1 << 30})
    assert len(check_hosts([HOST, other], "/d")) == 2
    assert check_hosts([HOST, replace(HOST, name="m2", clock_seconds=1.0)], "/d") == []


@pytest.mark.parametrize(("torch", "words"), [(None, "no torch"), ("2.6.0+cu124", "2.9 or later"), ("2.10.0", "")])
def test_an_old_torch_or_none_is_worth_a_warning(torch: str | None, words: str) -> None:
    assert [words in warning for warning in check_hosts([replace(HOST, torch=torch)], "/d")] == [True] * bool(words)


def test_the_hosts_whose_clocks_differ_most_are_named() -> None:
    clocks = {"a": 0.0, "b": 90.0, "c": -30.0, "d": 10.0}
    [warning] = check_hosts([replace(HOST, name=name, clock_seconds=clock) for name, clock in clocks.items()], "/d")
    assert "clocks of c and b differ by 120 s" in warning


@pytest.mark.parametrize(("boot", "is_one"), [("x", True), ("y", False)])
def test_machines_that_all_bear_the_same_name_are_several(boot: str, is_one: bool) -> None:
    found = [
        replace(HOST, name=name, facts={**HOST.facts, "boot_id": own, "node": "localhost"})
        for name, own in (("a", "x"), ("b", boot))
    ]
    assert any("are one machine" in warning for warning in check_hosts(found, "/d")) is is_one
