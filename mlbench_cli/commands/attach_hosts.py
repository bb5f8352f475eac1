"""`mlbench attach-hosts NAME`: use a list of machines that ssh reaches."""

import os
from pathlib import Path
from typing import Annotated

import typer

from mlbench_cli import console
from mlbench_cli.agent.channel import Channel, Target, close_all
from mlbench_cli.commands._clusters import cluster_document
from mlbench_cli.commands._common import Format, Output
from mlbench_cli.commands._machines import SshConfig, find_ssh_config, read_text_file, record
from mlbench_cli.engines.hosts import checks, hostfile
from mlbench_cli.errors import UsageError
from mlbench_cli.model.run import Cluster
from mlbench_cli.model.spec import check_name
from mlbench_cli.util.text import counted


def attach_hosts(
    name: Annotated[str, typer.Argument(metavar="NAME", help="name of the cluster in mlbench")],
    hosts: Annotated[str, typer.Option("--hosts", help="HOST[:SLOTS],... or a host file for mpirun (HOST slots=N)")],
    python: Annotated[str, typer.Option("--python", help="Python with torch on the hosts")] = "python3",
    folder: Annotated[str, typer.Option("--dir", help="folder on the hosts for runs and code")] = "~/.mlbench",
    interface: Annotated[
        str | None,
        typer.Option("--interface", help="network interface between the hosts; default: the interface of ssh"),
    ] = None,
    env_file: Annotated[
        Path | None,
        typer.Option("--env-file", help="file with environment variables of the ranks (KEY=VALUE), e.g. envs.conf"),
    ] = None,
    ssh_config: SshConfig = None,
    output: Output = Format.text,
) -> None:
    """Use existing machines over ssh. mlbench checks reachability, clocks, versions, disks and the network.

    mlbench installs nothing and leaves no process behind; delete-cluster only removes the hosts from mlbench.
    """
    check_name(name, "cluster name")
    ssh_config = find_ssh_config(ssh_config)
    path = Path(os.path.expanduser(hosts))
    is_file = "/" in hosts or path.suffix == ".txt" or os.path.isfile(path)
    entries = hostfile.parse_file(read_text_file(path, "--hosts")) if is_file else hostfile.parse_list(hosts)
    env = {} if env_file is None else hostfile.parse_environment(read_text_file(env_file, "--env-file"))
    if not folder.startswith(("/", "~/")) or any(letter in folder for letter in "\n\0:,"):
        raise UsageError(f"--dir {folder!r:.80} must be absolute or start with ~/.", hint="--dir /scratch/mlbench")
    channels = [Channel(Target(entry.login, python, ssh_config)) for entry in entries]
    try:
        found = checks.examine_hosts(entries, channels, folder, python, interface)
        homes = {str(item.facts["home"]) for item in found}
        if folder.startswith("~/") and len(homes) > 1:
            raise UsageError(f"The hosts have different home folders: {', '.join(sorted(homes))}.", hint="--dir DIR")
        absolute = os.path.normpath(homes.pop() + folder[1:] if folder.startswith("~/") else folder)
        warnings = checks.check_hosts(found, absolute)
        checks.check_network(found, channels)
    finally:
        close_all(channels)
    records = [checks.make_record(entry, facts) for entry, facts in zip(entries, found, strict=True)]
    details = {
        "hosts": records,
        "folder": absolute,
        "python": python,
        "ssh_config": ssh_config,
        "interface": interface or (found[0].interface if len({item.interface for item in found}) == 1 else None),
        "env": env,
        "nodes": len(records),
        "gpus_per_node": min(item.gpus for item in found),
        "packages": sorted(set.intersection(*(set(item.packages) for item in found))),
    }
    cluster = record(
        Cluster(name, "hosts", details={key: value for key, value in details.items() if value is not None})
    )
    if output == Format.json:
        documents = [
            {
                "name": item.name,
                "address": item.address,
                "interface": item.interface,
                "clock_seconds": round(item.clock_seconds, 3),
                "python": item.python,
                "torch": item.torch,
                "gpus": item.gpus,
                "free_bytes": item.facts["free_bytes"],
            }
            for item in found
        ]
        console.out_json({"cluster": cluster_document(cluster), "hosts": documents, "warnings": warnings})
        return
    for warning in warnings:
        console.warn(warning)
    slots = sum(entry.slots for entry in entries)
    console.out(
        f"The cluster {name} has {counted(len(records), 'host')} with {counted(slots, 'slot')}, "
        f"Python {found[0].python}, torch {found[0].torch or 'none'}, interface {details['interface'] or 'by host'}; "
        "commands now use it."
    )
