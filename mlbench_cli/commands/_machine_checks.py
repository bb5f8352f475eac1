"""`mlbench doctor slurm` and `mlbench doctor hosts`: what attached machines have now, and what is missing."""

import shutil
from collections.abc import Iterator

from mlbench_cli import console
from mlbench_cli.agent.channel import Channel, close_all
from mlbench_cli.engines.hosts import checks
from mlbench_cli.engines.hosts.hostfile import HostEntry
from mlbench_cli.engines.machines.details import HostsDetails, SlurmDetails
from mlbench_cli.engines.machines.engine import warn_of_torch
from mlbench_cli.engines.slurm import discovery
from mlbench_cli.engines.slurm.discovery import SlurmFacts
from mlbench_cli.errors import MlbenchError
from mlbench_cli.model.run import Cluster
from mlbench_cli.storage.store import Store
from mlbench_cli.util.text import counted
from providers.doctor import Check

KINDS = ("slurm", "hosts")


def check_machines(kind: str) -> Iterator[Check]:
    """One check for each requirement of runs on clusters of this kind; only those of this machine if none is
    attached."""
    found = [cluster for cluster in Store(notice=console.note).clusters() if cluster.provider == kind]
    yield _check_ssh()
    if not found:
        hint = f"mlbench attach-{kind} NAME"
        if kind == "slurm" and shutil.which("sinfo"):
            yield Check("slurm here", "ok", str(shutil.which("sinfo")))
        yield _missing(kind, "no such cluster attached", hint)
    for cluster in found:
        check = _check_slurm if kind == "slurm" else _check_hosts
        try:
            yield from check(cluster)
        except MlbenchError as error:
            yield Check(cluster.name, "failed", error.message, error.hint, error.exit_code)


def _missing(what: str, found: str, hint: str | None = None) -> Check:
    """What only some runs need, so it leaves the exit code as it is."""
    return Check(what, "missing", found, hint, exit_code=0)


def _check_ssh() -> Check:
    path = shutil.which("ssh")
    if path is None:
        return _missing("ssh", "not on PATH", "Needed for hosts, and for Slurm from another machine.")
    return Check("ssh", "ok", path)


def _check_slurm(cluster: Cluster) -> Iterator[Check]:
    details = SlurmDetails.of(cluster)
    channel = Channel(details.target)
    try:
        facts = discovery.discover_cluster(channel, details.folder)
        name = cluster.name
        yield Check(f"{name}: Slurm", "ok", f"{facts.version} through {channel.target.name}")
        yield _check_partition(name, details, facts)
        yield _check_folder(name, str(facts.host["writable"]), int(facts.host["free_bytes"]), details.folder)
        yield (
            Check(f"{name}: accounting", "ok", "slurmdbd")
            if facts.has_accounting
            else _missing(
                f"{name}: accounting",
                f"none; the controller forgets jobs {facts.min_job_age} s after they end",
                "Results do not depend on it, but later mlbench cannot find out why a job ended.",
            )
        )
        yield (
            Check(f"{name}: containers", "ok", facts.container)
            if facts.container
            else _missing(f"{name}: containers", "neither pyxis nor apptainer", "--image needs one of them.")
        )
        nodes = discovery.count_nodes(channel, details, facts.default_partition)
        if not nodes.idle:
            why = f"no node is idle, so none was probed ({nodes.phrase or 'none is known'})"
            yield _missing(f"{name}: nodes", why, "Try again later.")
            return
        probes = discovery.probe_nodes(channel, details, nodes)
        discovery.check_probes(probes, details)
        torch = f"torch {probes[0].torch}" if probes[0].torch else "no torch"
        others = f"; {nodes.phrase}" if nodes.phrase else ""
        silent = nodes.idle - len(probes)
        others += f"; {counted(silent, 'idle node')} did not answer" if silent > 0 else ""
        found = f"{len(probes)} probed{others}: all see {details.folder}; Python {probes[0].python}, {torch}"
        if warnings := warn_of_torch(probes[0].torch):
            yield _missing(f"{name}: nodes", found, *warnings)
        elif silent > 0:
            yield _missing(f"{name}: nodes", found, "Try again later: others may have taken them.")
        else:
            yield Check(f"{name}: nodes", "ok", found)
    finally:
        channel.close()


def _check_partition(name: str, details: SlurmDetails, facts: SlurmFacts) -> Check:
    chosen = details.partition or facts.default_partition or ""
    partition = facts.partitions.get(chosen)
    if partition is None:
        known = ", ".join(facts.partitions)
        return Check(f"{name}: partition", "failed", f"no {chosen or 'default'}, only {known}", "mlbench attach-slurm")
    limit = "no time limit" if partition["max_seconds"] is None else f"{partition['max_seconds']} s at most"
    gpus = f", {counted(partition['gpus_per_node'], 'GPU')} each" if partition["gpus_per_node"] else ", no GPUs"
    return Check(f"{name}: partition", "ok", f"{chosen}: {counted(partition['nodes'], 'node')}{gpus}, {limit}")


def _check_folder(name: str, writable: str, free: int, folder: str) -> Check:
    if writable != "True":
        return Check(f"{name}: folder", "failed", f"cannot write to {folder}", "mlbench attach-slurm --shared DIR")
    return Check(f"{name}: folder", "ok", f"{folder}, {free >> 30} GiB free")


def _check_hosts(cluster: Cluster) -> Iterator[Check]:
    details = HostsDetails.of(cluster)
    entries = [HostEntry(host["login"], host["slots"]) for host in details.hosts]
    channels = [Channel(details.target(host)) for host in details.hosts]
    try:
        found = checks.examine_hosts(entries, channels, details.folder, details.python, details.interface)
        warnings = checks.check_hosts(found, details.folder)
        checks.check_network(found, channels)
        for item in found:
            torch = f"torch {item.torch}" if item.torch else "no torch"
            text = f"{item.address} on {item.interface}, Python {item.python}, {torch}, {counted(item.gpus, 'GPU')}, "
            text += f"{int(item.facts['free_bytes']) >> 30} GiB free, clock {item.clock_seconds:+.1f} s"
            yield Check(f"{cluster.name}: {item.name}", "ok", text)
        for warning in warnings:
            yield _missing(cluster.name, warning)
    finally:
        close_all(channels)
