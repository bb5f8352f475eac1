"""`mlbench certify`: which machines must go back, and what will this cluster deliver?"""

import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from msgspec.structs import replace

from mlbench_cli import console
from mlbench_cli.api import Client
from mlbench_cli.certify.certificate import (
    ARCHIVE,
    Certificate,
    check_folder,
    choose_peers,
    find_other_hardware,
    read_certificate,
    write_files,
)
from mlbench_cli.certify.expectations import read_expectations
from mlbench_cli.certify.plan import make_plan
from mlbench_cli.commands._common import Format, Output, Yes, complete_clusters
from mlbench_cli.commands._members import follow_run
from mlbench_cli.commands._request_options import add_request_options
from mlbench_cli.commands._selection import complete_names
from mlbench_cli.errors import MlbenchError, NeverStartedError, Stopped, UsageError
from mlbench_cli.model.run import Cluster
from mlbench_cli.model.spec import MAX_TIMEOUT
from mlbench_cli.results.archive.sign import require_key
from mlbench_cli.runs.request import OPTIONS, Request, equivalent_command, given_value
from mlbench_cli.tasks.catalog import load_task
from mlbench_cli.util import stopping
from mlbench_cli.util.durations import parse_duration
from task_images.certify.rules import STAGES

LEVELS = {"quick": "spec", "standard": "standard", "soak": "soak"}
OF_RUN = ("image", "pull_secret", "start_timeout", "queue", "node_selector")  # options that mlbench run has, too
LOCAL_NODES = 4
RECHECKED = ("node", "pairs")
PARTIAL_SECONDS, PRESENTED_SECONDS = 150.0, 30.0  # for a run that was stopped here to complete its archive, and to show


def certify(
    context: typer.Context,
    cluster: Annotated[
        str | None, typer.Argument(metavar="[CLUSTER]", help="cluster to accept", autocompletion=complete_clusters)
    ] = None,
    level: Annotated[
        str,
        typer.Option(
            "--level",
            metavar="LEVEL",
            help="quick, standard or soak",
            autocompletion=lambda incomplete: _begin(LEVELS, incomplete),
        ),
    ] = "quick",
    nodes: Annotated[
        int | None, typer.Option("--nodes", metavar="N", help="number of nodes; default: all of the cluster")
    ] = None,
    hours: Annotated[float | None, typer.Option("--hours", help="duration of the soak; default: 24")] = None,
    budget: Annotated[
        str | None,
        typer.Option("--budget", metavar="DURATION", help="longest time, e.g. 30m; suspects stay on watch then"),
    ] = None,
    expect: Annotated[
        Path | None,
        typer.Option("--expect", metavar="FILE", help="YAML list of published figures to compare collectives with"),
    ] = None,
    like: Annotated[
        Path | None,
        typer.Option("--like", metavar="ARCHIVE", help="archive of an earlier certificate to compare nodes with"),
    ] = None,
    recheck: Annotated[
        str | None,
        typer.Option("--recheck", metavar="NODE", help="measure NODE of --like again, beside three nodes that were ok"),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            metavar="STAGE",
            help=f"measure only this; may be repeated: {', '.join(STAGES)}",
            autocompletion=lambda incomplete: _begin(STAGES, incomplete),
        ),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option("--to", "--out", metavar="DIR", help="folder of the certificate; default: certificate-NAME here"),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="RUN",
            help="measure nothing; write the certificate of a run that has ended",
            autocompletion=complete_names,
        ),
    ] = None,
    gpu: Annotated[bool, typer.Option("--gpu", "-g", help="test GPUs")] = False,
    key: Annotated[
        Path | None, typer.Option("--sign", metavar="KEY", help="sign the archive with this private OpenSSH key")
    ] = None,
    yes: Yes = False,
    output: Output = Format.text,
    **options: Any,
) -> int:
    """Test every node of a cluster alone, in pairs and together: which must go back, and what do the others deliver?

    It is an ordinary run of the task certify: no root, controller or MPI. Suspects are measured again beside healthy
    nodes, over a time that outlasts disturbances. The archive has all samples, and mlbench verify derives the same
    verdict from them. Commands that take nodes out are printed, never run. On the cluster "local", workers on this
    machine stand for nodes.

    Exit code 0: accepted; 7: nodes are named, or the cluster is rejected; 9: cannot tell; 6: no node could start.
    """
    client = Client(notice=console.note)
    if key is not None:
        require_key(key)
    check_folder(to or Path())
    earlier = None if like is None else read_certificate(like)
    if source is not None:
        return _present(_find_archive(client, source), to, key, earlier, output)
    if cluster is None:
        raise UsageError("Which cluster is to be accepted?", hint="mlbench list-clusters, then: mlbench certify NAME")
    _check_stages(level, only, hours)
    changes: dict[str, Any] = {} if hours is None else {"soak_hours": hours}
    given = {name: given_value(name, value) for name, value in options.items() if value not in (None, [])}
    found, request = client.store.cluster(cluster), Request(gpu=gpu or None, **given)
    if earlier is not None:
        changes["earlier"] = earlier.digest
    if recheck is not None:
        measured = _plan_recheck(recheck, earlier, cluster, nodes)
        changes["recheck"], only, nodes = recheck, only or list(RECHECKED), len(measured)
        request = replace(request, nodes=",".join(measured))
    if only:
        changes["stages"] = ",".join(stage for stage in STAGES if stage in ("drift", *only))
    nodes, task = _count_nodes(found, nodes), load_task("certify")
    if expect is not None:
        figures = read_expectations(expect, cluster, nodes)
        changes["expect"] = msgspec.json.encode(figures).decode()
        sizes = {*task.resolve(LEVELS[level])["sizes"], *(figure.bytes for figure in figures)}
        changes["sizes"] = sorted(sizes)
    plan = make_plan(
        task.resolve(LEVELS[level], changes),
        nodes,
        int(found.details.get("gpus_per_node") or 1) if gpu else 1,
        gpu=gpu,
        one_machine=found.provider == "local",
        per_hour=(found.details.get("plan") or {}).get("price_per_hour"),
    )
    limit = plan.timeout
    if budget is not None:
        limit = min(parse_duration(budget, "--budget"), MAX_TIMEOUT)
        plan = plan.within(limit)
        changes["confirm_seconds"] = plan.confirmed
    name, timeout = _free_name(client, cluster), f"{max(1, round(limit))}s"
    program: dict[str, Any] = {"task": "certify", "preset": LEVELS[level], "set": changes}
    request = replace(request, name=name, workers=(nodes,), cluster=cluster, timeout=timeout, **program)
    return _measure(
        context,
        client,
        request,
        plan.describe(cluster, level),
        asks=not yes and cluster != "local",
        present=lambda source, stopped: _present(source, to, key, earlier, output, stopped),
    )


add_request_options(certify, (item for item in OPTIONS if item.name in OF_RUN))


def _measure(
    context: typer.Context,
    client: Client,
    request: Request,
    description: str,
    *,
    asks: bool,
    present: Callable[[Path, Stopped | None], int],
) -> int:
    """Run the request, to its end or to Ctrl-C, and present its certificate. Returns the exit code."""
    afterwards = f"mlbench certify --from {request.name}"
    try:
        launch = client.prepare(request)
        launch.render()
        console.note(description)
        console.confirm("Start?", yes=not asks)
        with launch.open(("mlbench", *context.obj)) as opened:
            opened.record()
            run = opened.left[0]
            try:
                follow_run(opened, run)
            except Stopped as stopped:
                if run.runs_here and not run.is_finished:
                    stopping.take_longer(PARTIAL_SECONDS + PRESENTED_SECONDS)
                    console.note(
                        f"Writing what was measured (at most {PARTIAL_SECONDS:g} s); Ctrl-C again leaves it to: "
                        + afterwards
                    )
                    with suppress(MlbenchError):
                        run.wait(PARTIAL_SECONDS)
                if run.is_finished:
                    present(run.folder, stopped)
                else:
                    stopped.hint = f"{stopped.hint}; when it has ended: {afterwards}"
                raise
    except MlbenchError as error:
        own = {option for parameter in context.command.params for option in parameter.opts}
        others = {f"--{item.name.replace('_', '-')}" for item in OPTIONS} - own - {"--cluster"}
        if named := [word for word in re.findall(r"--[a-z-]+", error.hint or "") if word in others]:
            words = f"{equivalent_command(request)} {named[0]} ..., then: {afterwards}"
            error.hint = f"{error.hint} Only mlbench run has that option: {words}"
        raise
    return present(run.folder, None)


def _begin(words: Iterable[str], start: str) -> list[str]:
    return [word for word in words if word.startswith(start)]


# --- before the run -------------------------------------------------------------------------------------------------


def _find_archive(client: Client, name: str) -> Path:
    found = client.find_archives([name])
    if len(found) != 1:
        raise UsageError(f"{name} has {len(found)} archives, and a certificate has one.", hint="mlbench status")
    return found[0]


def _check_stages(level: str, only: Sequence[str] | None, hours: float | None) -> None:
    if level not in LEVELS:
        raise UsageError(f'There is no level "{level}".', hint=f"--level {', '.join(LEVELS)}")
    if unknown := [stage for stage in only or () if stage not in STAGES]:
        raise UsageError(f'There is no stage "{unknown[0]}".', hint=f"--only {', '.join(STAGES)}")
    soaks = level == "soak" and "soak" in (only or STAGES)
    if not soaks and (hours is not None or "soak" in (only or ())):
        hint = f"--level soak{' --only soak' * bool(only)} --hours 24"
        raise UsageError("Only the stage soak, of --level soak, repeats the others for --hours.", hint=hint)
    if hours is not None and not 0 < hours <= 720:
        raise UsageError(f"--hours {hours:g} is not allowed.", hint="Above 0, and at most 720.")


def _plan_recheck(node: str, earlier: Certificate | None, cluster: str, nodes: int | None) -> tuple[str, ...]:
    if earlier is None:
        raise UsageError(
            "--recheck needs the certificate in which the node was a suspect.",
            hint=f"mlbench certify {cluster} --recheck {shlex.quote(node)} --like certificate/archive.zip",
        )
    if nodes is not None:
        raise UsageError("--recheck measures the node and three others.", hint="Leave out --nodes.")
    if earlier.run["spec"]["cluster"] != cluster:
        own = earlier.run["spec"]["cluster"]
        raise UsageError(
            f"The earlier certificate is of the cluster {own}.", hint=f"mlbench certify {own} --recheck ... --like ..."
        )
    return (*choose_peers(earlier, node), node)


def _count_nodes(cluster: Cluster, asked: int | None) -> int:
    """The nodes to test: as many as asked for, or all that the cluster's record says it has."""
    partitions, chosen = cluster.details.get("partitions") or {}, cluster.details.get("partition")
    for name, partition in partitions.items():
        if asked is None and (
            name == chosen or (chosen is None and (partition.get("default") or len(partitions) == 1))
        ):
            asked = int(partition["nodes"])
    known = cluster.details.get("nodes") or len(cluster.details.get("hosts") or ())
    nodes = asked if asked is not None else LOCAL_NODES if cluster.provider == "local" else known
    if not nodes and asked is None:
        raise UsageError(f"{cluster.name} does not say how many nodes it has.", hint="Say so: --nodes N")
    if nodes < 2:
        raise UsageError("A certificate needs at least 2 nodes, and 4 to name one.", hint="--nodes 4")
    return int(nodes)


def _free_name(client: Client, cluster: str) -> str:
    base = f"certify-{cluster}"[:34].rstrip("-")
    # NAME-N is the run with N workers, so the number of an experiment must not stand there.
    names = (base if number == 1 else f"{base}-no{number}" for number in count(1))
    return next(name for name in names if client.store.find_experiment(name) is None)


# --- after the run --------------------------------------------------------------------------------------------------


def _present(
    source: Path,
    to: Path | None,
    key: Path | None,
    earlier: Certificate | None,
    output: Format,
    stopped: Stopped | None = None,
) -> int:
    """Write the files of a certificate and print its verdict, with what `stopped` the command. Returns the exit
    code."""
    certificate = read_certificate(source)
    if earlier is not None and (other := find_other_hardware(earlier, certificate)):
        console.warn(f"The earlier certificate is of other hardware: {other}. Nodes are not compared with it.")
        earlier = None
    name = str(certificate.run["name"])
    folder = to or Path(f"certificate-{name}")
    changes = write_files(certificate, source, folder, key, earlier)
    document = certificate.document
    if output is Format.json:
        console.out_json({"run": name, "archive": certificate.digest, "folder": str(folder), **document}, stopped)
    else:
        rows = [[node["node"], node["state"], ", ".join(node["reasons"])] for node in document["nodes"]]
        console.out(certificate.headline)
        shown = [row for row in rows if row[1] != "ok"] if len(rows) > 16 else rows
        console.out_table(["NODE", "STATE", "REASONS"], shown)
    for text in document["contradictions"]:
        console.warn(f"The evidence contradicts itself: {text}.")
    for found in document["findings"]:
        console.note(f"{found['reason']}: {found['summary']}")
    for drift in document["drift"]:
        others = "; ".join(f"{value or 'absent'} on {', '.join(some)}" for value, some in drift["others"].items())
        console.note(f"drift:{drift['key']}: {drift['usual'] or 'absent'}, but {others}")
    if earlier is not None:
        since = f"Since certificate {earlier.digest[:12]} of {earlier.run['created']}"
        for text in changes or ["no node has changed its state"]:
            console.note(f"{since}: {text}.")
    console.note(certificate.sureness)
    unsure = [node for node in document["nodes"] if node["state"] in ("slow", "watch")]
    for node in (node for node in unsure if node["node"] in certificate.places):
        archive = shlex.quote(str(folder / ARCHIVE))
        spec = certificate.run["spec"]
        words = f"mlbench certify {spec['cluster']}{' --gpu' * (spec['device'] == 'gpu')}"
        words += f" --recheck {shlex.quote(node['node'])} --like {archive}"
        console.note(f"To see whether {node['node']} is still slow in two hours: {words}")
    for command in certificate.commands():
        console.note(f"For you to run: {command}")
    console.next_step(f"mlbench verify {shlex.quote(str(folder / ARCHIVE))}")
    if certificate.exit_code == NeverStartedError.exit_code:
        console.warn(" ".join(["No node could start.", *certificate.obstacles[:3]]))
    return certificate.exit_code
