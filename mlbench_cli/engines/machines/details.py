"""Typed views of the records of Slurm clusters and host lists."""

from collections.abc import Mapping, Sequence
from typing import TypedDict

from mlbench_cli.agent.channel import Target
from mlbench_cli.engines.placement import HostRecord
from mlbench_cli.model.cluster_details import MachineDetails


class PartitionRecord(TypedDict):
    """One partition: `max_seconds` is None without a limit, `gpus_per_node` 0 without GPUs."""

    max_seconds: int | None
    nodes: int
    gpus_per_node: int
    default: bool


class SlurmDetails(MachineDetails, frozen=True):
    """`login` is None if mlbench runs on a login node. `setup` are shell lines before the ranks start."""

    login: str | None = None
    login_python: str | None = None  # of the login node, if that lacks the nodes' `python`
    partition: str | None = None
    slurm_account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    switches: str | None = None
    setup: str = ""
    exclusive: bool = True
    container: str | None = None  # pyxis | apptainer | singularity
    version: str = ""
    kill_wait: int = 30  # seconds between Slurm's TERM and KILL
    has_accounting: bool = False
    partitions: Mapping[str, PartitionRecord] = {}

    @property
    def target(self) -> Target:
        """The machine whose Slurm commands are used: this one or a login node."""
        return Target(self.login, self.login_python or self.python, self.ssh_config)

    def find_partition(self) -> PartitionRecord | None:
        """The partition of the runs: the one chosen, else Slurm's default."""
        if self.partition is not None:
            return self.partitions.get(self.partition)
        return next((item for item in self.partitions.values() if item["default"]), None)


class HostsDetails(MachineDetails, frozen=True):
    """`hosts` are the records of the attached hosts, in the order of the host file."""

    hosts: Sequence[HostRecord] = []

    @property
    def slots(self) -> int:
        """How many ranks all hosts together take."""
        return sum(host["slots"] for host in self.hosts)

    def target(self, host: HostRecord) -> Target:
        """A host as ssh knows it."""
        return Target(host["login"], self.python, self.ssh_config)
