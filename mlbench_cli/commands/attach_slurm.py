"""`mlbench attach-slurm NAME`: use a Slurm cluster, from a login node or through ssh."""

import os
from pathlib import Path
from typing import Annotated

import typer

from mlbench_cli import console
from mlbench_cli.agent.channel import check_login
from mlbench_cli.commands._clusters import cluster_document
from mlbench_cli.commands._common import Format, Output
from mlbench_cli.commands._machines import SshConfig, find_ssh_config, read_text_file, record
from mlbench_cli.engines.machines.details import SlurmDetails
from mlbench_cli.engines.machines.engine import warn_of_torch
from mlbench_cli.engines.slurm import discovery
from mlbench_cli.errors import UsageError
from mlbench_cli.model.run import Cluster
from mlbench_cli.model.spec import check_name
from mlbench_cli.util.text import counted


def attach_slurm(
    name: Annotated[str, typer.Argument(metavar="NAME", help="name of the cluster in mlbench")],
    login: Annotated[str | None, typer.Option("--login", help="login node as USER@HOST; default: this machine")] = None,
    partition: Annotated[
        str | None, typer.Option("--partition", help="partition of the jobs; default: the default partition")
    ] = None,
    account: Annotated[str | None, typer.Option("--account", help="account of the jobs")] = None,
    qos: Annotated[str | None, typer.Option("--qos", help="QOS of the jobs")] = None,
    constraint: Annotated[
        str | None, typer.Option("--constraint", help="required node features, as in sbatch --constraint")
    ] = None,
    switches: Annotated[
        str | None, typer.Option("--switches", help="COUNT[@MAX-TIME]: maximum number of leaf switches, as in sbatch")
    ] = None,
    shared: Annotated[
        str | None,
        typer.Option("--shared", help="folder on a shared file system; default: ~/.mlbench of the login node"),
    ] = None,
    python: Annotated[str, typer.Option("--python", help="Python with torch on the nodes")] = "python3",
    setup: Annotated[
        Path | None,
        typer.Option("--setup", help="shell script to source before the ranks start, e.g. with module load"),
    ] = None,
    interface: Annotated[
        str | None, typer.Option("--interface", help="network interface; default: detected at the start of a run")
    ] = None,
    exclusive: Annotated[
        bool, typer.Option("--exclusive/--share-nodes", help="allocate whole nodes to each run")
    ] = True,
    probe: Annotated[bool, typer.Option("--probe/--no-probe", help="check every idle node with a short job")] = True,
    ssh_config: SshConfig = None,
    output: Output = Format.text,
) -> None:
    """Use an existing Slurm cluster. mlbench installs nothing; delete-cluster only removes it from mlbench.

    A short job on each idle node checks the shared folder and the versions.
    """
    check_name(name, "cluster name")
    ssh_config = find_ssh_config(ssh_config)
    for option, value in {
        "--partition": partition,
        "--account": account,
        "--qos": qos,
        "--constraint": constraint,
        "--switches": switches,
    }.items():
        if value is not None and (not value.strip() or any(letter.isspace() or ord(letter) < 32 for letter in value)):
            raise UsageError(
                f"{option} {value!r:.80} is empty or contains spaces.", hint="sinfo -s; sacctmgr show assoc"
            )
    channel = discovery.open_login(None if login is None else check_login(login), python, ssh_config)
    try:
        facts = discovery.discover_cluster(channel, shared or "~/.mlbench")
        folder = _absolute(shared or "~/.mlbench", str(facts.host["home"]))
        details = SlurmDetails(
            folder=folder,
            python=python,
            partition=partition,
            slurm_account=account,
            qos=qos,
            constraint=constraint,
            setup="" if setup is None else read_text_file(setup, "--setup"),
            partitions=facts.partitions,
        )
        discovery.check_choice(channel, facts, details)
        chosen = facts.partitions[partition or facts.default_partition or ""]
        probes: list[discovery.NodeProbe] = []
        counted_nodes: discovery.NodeCount | None = None
        if probe:
            counted_nodes = discovery.count_nodes(channel, details, facts.default_partition)
            if counted_nodes.idle:
                probes = discovery.probe_nodes(channel, details, counted_nodes)
                discovery.check_probes(probes, details)
                if len(probes) < counted_nodes.idle:
                    console.warn(
                        f"Only {', '.join(item.node for item in probes)} answered, of {counted_nodes.idle} idle nodes: "
                        "whether the others see the shared folder is not known. Later: mlbench doctor slurm"
                    )
            else:
                console.warn(
                    f"No node of the partition is idle ({counted_nodes.phrase or 'none is known'}), so none was "
                    "probed: "
                    "whether they see the shared folder is not known. Later: mlbench doctor slurm"
                )
    finally:
        channel.close()
    record_details = {
        "login": login,
        "login_python": None if channel.target.python == python else channel.target.python,
        "ssh_config": ssh_config,
        "folder": folder,
        "python": python,
        "partition": partition,
        "slurm_account": account,
        "qos": qos,
        "constraint": constraint,
        "switches": switches,
        "setup": details.setup,
        "interface": interface,
        "exclusive": exclusive,
        "container": facts.container,
        "version": facts.version,
        "kill_wait": facts.kill_wait,
        "has_accounting": facts.has_accounting,
        "partitions": {key: dict(value) for key, value in facts.partitions.items()},
        "nodes": chosen["nodes"],
        "gpus_per_node": chosen["gpus_per_node"],
        "machine_type": partition or facts.default_partition,
        "packages": sorted(set.intersection(*(set(item.packages) for item in probes))) if probes else None,
    }
    cluster = record(
        Cluster(name, "slurm", details={key: value for key, value in record_details.items() if value is not None})
    )
    if output == Format.json:
        console.out_json({"cluster": cluster_document(cluster), "nodes": [vars(item) for item in probes]})
        return
    if not facts.has_accounting:
        console.note(
            f"Accounting is off: the controller forgets jobs {facts.min_job_age} s after they end. Results do not "
            "depend "
            "on it."
        )
    for warning in warn_of_torch(probes[0].torch) if probes else ():
        console.warn(warning)
    unprobed = chosen["nodes"] - len(probes)
    if unprobed > 0 and probes:
        why = f" ({counted_nodes.phrase})" if counted_nodes is not None and counted_nodes.phrase else ""
        console.note(f"{counted(unprobed, 'node was', 'nodes were')} not probed{why}.")
    console.out(
        f"The cluster {name} is Slurm {facts.version}, partition {partition or facts.default_partition} with "
        f"{counted(chosen['nodes'], 'node')}; commands now use it."
    )


# Slurm reads these as patterns, quotes or comments of a batch script, and mounts as separators.
UNFIT = "%\\#:,\"'`"


def _absolute(path: str, home: str) -> str:
    if path.startswith("~/") or path == "~":
        path = home + path[1:]
    if not path.startswith("/"):
        raise UsageError(f"--shared {path!r:.80} is not an absolute path.", hint="--shared /scratch/me")
    if wrong := next((letter for letter in path if letter in UNFIT or letter.isspace() or ord(letter) < 32), None):
        raise UsageError(
            f"--shared {path!r:.80} contains {wrong!r}, which Slurm cannot have in the names of a job's files.",
            hint="Choose a folder without blanks, quotes, and the characters % # : , and backslash.",
        )
    return os.path.normpath(path)
