"""Typed views of the records of Slurm clusters and host lists."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from mlbench_cli.agent.channel import Target
from mlbench_cli.model.cluster_details import MachineDetails, fact


class PartitionRecord(TypedDict):
    """One partition: `max_seconds` is None without a limit, `gpus_per_node` 0 without GPUs."""

    max_seconds: int | None
    nodes: int
    gpus_per_node: int
    default: bool


class HostRecord(TypedDict):
    """One host: `login` as ssh knows it, `address` at which the other hosts reach it."""

    name: str
    login: str
    slots: int
    address: str
    interface: str | None


@dataclass(frozen=True)
class SlurmDetails(MachineDetails):
    """`login` is None if mlbench runs on a login node. `setup` are shell lines before the ranks start."""

    login: str | None = fact(str)
    partition: str | None = fact(str)
    slurm_account: str | None = fact(str)
    qos: str | None = fact(str)
    constraint: str | None = fact(str)
    switches: str | None = fact(str)
    setup: str = fact(str, default="")
    exclusive: bool = fact(bool, default=True)
    container: str | None = fact(str)  # pyxis | apptainer | singularity
    version: str = fact(str, default="")
    kill_wait: int = fact(int, default=30)  # seconds between Slurm's TERM and KILL
    has_accounting: bool = fact(bool, default=False)
    partitions: Mapping[str, PartitionRecord] = field(default_factory=dict, metadata={"types": (dict,)})

    @property
    def target(self) -> Target:
        """The machine whose Slurm commands are used: this one or a login node."""
        return Target(self.login, self.python, self.ssh_config)

    def find_partition(self) -> PartitionRecord | None:
        """The partition of the runs: the one chosen, else Slurm's default."""
        if self.partition is not None:
            return self.partitions.get(self.partition)
        return next((item for item in self.partitions.values() if item["default"]), None)


@dataclass(frozen=True)
class HostsDetails(MachineDetails):
    """`hosts` are the records of the attached hosts, in the order of the host file."""

    hosts: Sequence[HostRecord] = field(default_factory=list, metadata={"types": (list,)})

    @property
    def slots(self) -> int:
        """How many ranks all hosts together take."""
        return sum(host["slots"] for host in self.hosts)

    def target(self, host: HostRecord) -> Target:
        """A host as ssh knows it."""
        return Target(host["login"], self.python, self.ssh_config)
