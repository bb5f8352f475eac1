"""Checks of what hosts must have in common for meaningful runs; done when they are attached."""

import ipaddress
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlbench_cli.agent.channel import Channel, Document
from mlbench_cli.engines.hosts.hostfile import HostEntry
from mlbench_cli.engines.machines.engine import MIN_FREE_BYTES, check_folder, run_in_parallel, warn_of_torch
from mlbench_cli.engines.placement import HostRecord
from mlbench_cli.errors import MlbenchError, NotFoundError, UnreachableError, UsageError

MAX_CLOCK_SECONDS = 5.0  # clock difference that triggers a warning
PROBE_SECONDS = 150.0


@dataclass(frozen=True)
class HostFacts:
    """The answer of one host. `clock_seconds` is how far its clock is ahead of this machine's."""

    name: str
    facts: Document
    clock_seconds: float
    python: str
    torch: str | None
    gpus: int
    interface: str | None
    address: str
    packages: tuple[str, ...]


def examine_hosts(
    entries: Sequence[HostEntry], channels: Sequence[Channel], folder: str, python: str, interface: str | None
) -> list[HostFacts]:
    """Ask all hosts at once. Raises the first host's error (unreachable, host key, login, Python), and names the other
    hosts that have one."""
    pairs = list(zip(entries, channels, strict=True))
    answers = run_in_parallel(lambda pair: _examine(*pair, folder, python, interface), pairs)
    failed = {
        entry.login: answer for entry, answer in zip(entries, answers, strict=True) if isinstance(answer, MlbenchError)
    }
    if failed:
        (_, error), *others = failed.items()
        if others:
            names = ", ".join(name for name, _ in others)
            error.message = f"{error.message.rstrip('.')}. These hosts cannot be used either: {names}."
        raise error
    return [answer for answer in answers if not isinstance(answer, MlbenchError)]


def _examine(entry: HostEntry, channel: Channel, folder: str, python: str, interface: str | None) -> HostFacts:
    channel.call("hello", base=folder)  # connects
    sent = time.time()
    facts = channel.call("hello", base=folder)
    clock = float(facts["time"]) - (sent + time.time()) / 2
    probe = channel.call("probe", python=python, seconds=PROBE_SECONDS)
    name = entry.login.rpartition("@")[2]
    chosen, address = choose_address(facts["addresses"], str(facts["connection"]), interface, name)
    versions = str(probe["python"]), probe["torch"]
    return HostFacts(name, facts, clock, *versions, int(probe["gpus"]), chosen, address, tuple(probe["packages"]))


def choose_address(
    addresses: Sequence[Mapping[str, str]], connection: str, interface: str | None, name: str
) -> tuple[str | None, str]:
    """Interface and address at which other hosts reach this one: that of `interface`, else the address that ssh
    connected to.

    `connection` is SSH_CONNECTION: client, its port, server, its port. Raises NotFoundError for an unknown interface.
    """
    if interface is not None:
        chosen = [item for item in addresses if item["interface"] == interface]
        if not chosen:
            known = ", ".join(item["interface"] for item in addresses)
            raise NotFoundError(f"{name} has no interface {interface} with an address, only {known}.")
        addresses = chosen
    parts = connection.split()
    server = parts[2] if len(parts) == 4 else ""
    for item in addresses:
        if item["address"] == server:
            return item["interface"], server
    for item in addresses:
        if _is_in_network(server, item):
            return item["interface"], server
    best = [item for item in addresses if not ipaddress.ip_address(item["address"]).is_loopback] or list(addresses)
    if not best:
        raise UsageError(f"{name} has no address.", hint="--interface IF")
    return best[0]["interface"], best[0]["address"]


def _is_in_network(address: str, item: Mapping[str, str]) -> bool:
    try:
        network = ipaddress.ip_network(f"{item['address']}/{item['mask']}", strict=False)
        return ipaddress.ip_address(address) in network
    except ValueError:
        return False


def check_hosts(found: Sequence[HostFacts], folder: str) -> list[str]:
    """Reject hosts on which runs cannot be compared. Returns warnings.

    Raises UsageError for versions that differ, CapacityError for a full disk.
    """
    for item in found:
        check_folder(item.facts, folder, item.name, "--dir DIR")
    for what, values in (
        ("Python", {item.name: item.python for item in found}),
        ("torch", {item.name: item.torch or "none" for item in found}),
    ):
        if len(set(values.values())) > 1:
            listed = ", ".join(f"{name} has {value}" for name, value in values.items())
            raise UsageError(
                f"The hosts have different versions of {what}: {listed}.",
                hint="--python PATH   must be the same environment on all",
            )
    return [
        *_warn_of_duplicates(found),
        *_warn_of_clocks(found),
        *_warn_of_space(found),
        *warn_of_torch(found[0].torch),
    ]


def _warn_of_duplicates(found: Sequence[HostFacts]) -> list[str]:
    """Hosts that are one machine: the same kernel since its start, by the same name."""
    names: dict[tuple[str, str], list[str]] = {}
    for item in found:
        if item.facts.get("boot_id"):
            names.setdefault((str(item.facts["boot_id"]), str(item.facts.get("node"))), []).append(item.name)
    return [
        f"{', '.join(same)} are one machine ({node}), so their ranks share its CPUs; list it once, with slots=N."
        for (_, node), same in names.items()
        if len(same) > 1
    ]


def _warn_of_clocks(found: Sequence[HostFacts]) -> list[str]:
    clocks = {item.name: item.clock_seconds for item in found}
    spread = max(clocks.values()) - min(clocks.values())
    if spread <= MAX_CLOCK_SECONDS:
        return []
    first, last = min(clocks, key=lambda name: clocks[name]), max(clocks, key=lambda name: clocks[name])
    return [f"The clocks of {first} and {last} differ by {spread:.0f} s; times in logs cannot be compared."]


def _warn_of_space(found: Sequence[HostFacts]) -> list[str]:
    scarce = [item.name for item in found if int(item.facts["free_bytes"]) < MIN_FREE_BYTES]
    return [f"Little free disk space on {', '.join(scarce)}."] if scarce else []


def check_network(found: Sequence[HostFacts], channels: Sequence[Channel]) -> None:
    """Every host must reach the first one at its address, on a port that it chooses. Raises UnreachableError."""
    if len(found) < 2:
        return
    port = channels[0].call("listen")["port"]
    address = found[0].address
    answers = run_in_parallel(lambda channel: channel.call("connect", address=address, port=port), channels[1:])
    for item, answer in zip(found[1:], answers, strict=True):
        if isinstance(answer, MlbenchError):
            raise answer
        if not answer["reached"]:
            raise UnreachableError(
                f"{item.name} does not reach {found[0].name} at {address}: {answer['problem']}. "
                "Ranks would not find each other.",
                hint="--interface IF   selects the network that the hosts share. Also check firewalls.",
            )


def make_record(entry: HostEntry, facts: HostFacts) -> HostRecord:
    """What the store keeps of a host: the user's entry with the name, address and interface that the host reported."""
    return HostRecord(
        name=facts.name, login=entry.login, slots=entry.slots, address=facts.address, interface=facts.interface
    )
