"""`mlbench attach-cluster NAME`: use a cluster that you already have, with rights in one namespace only."""

from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace

from mlbench_cli import console
from mlbench_cli.clusters.manage import require_free_name
from mlbench_cli.commands._clusters import cluster_document
from mlbench_cli.commands._common import Format, Output
from mlbench_cli.errors import CredentialError
from mlbench_cli.kube.api import require_version
from mlbench_cli.model.spec import check_name
from mlbench_cli.storage.store import Store
from mlbench_cli.util.text import counted
from providers import registry
from providers.attached import (
    check_rights,
    is_kind,
    name_rights,
    new_attached_cluster,
    read_device_classes,
    read_node_facts,
    read_queue_facts,
    read_runtime_class,
    role_manifests,
)
from templates import dump


def attach_cluster(
    name: Annotated[str, typer.Argument(metavar="NAME", help="name of the cluster in mlbench")],
    context: Annotated[
        str | None, typer.Option("--context", help="kubeconfig context; default: the current context")
    ] = None,
    kubeconfig: Annotated[
        Path | None,
        typer.Option(
            "--kubeconfig",
            help="kubeconfig file; default: $KUBECONFIG, ~/.kube/config, or the service account in a pod",
        ),
    ] = None,
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", help="namespace of the runs; default: namespace of the context")
    ] = None,
    role: Annotated[
        bool, typer.Option("--role", help="print the Role that runs need (for kubectl apply), then exit")
    ] = False,
    output: Output = Format.text,
) -> None:
    """Use an existing Kubernetes cluster. mlbench only reads its kubeconfig; delete-cluster removes it from mlbench but
    does not delete it.
    """
    if role:
        console.out(dump(role_manifests(namespace or "default")).rstrip(), raw=True)
        return
    check_name(name, "cluster name")
    store = Store(notice=console.note)
    cluster = new_attached_cluster(name, kubeconfig, context, namespace)
    require_free_name(store, cluster)
    access = registry.load("attached").connect(cluster)
    version = require_version(access.client())
    rights = check_rights(access)
    missing = [right for right in rights if right.needed and not right.allowed]
    if missing:
        raise CredentialError(
            f"In the namespace {cluster.details['namespace']} of {cluster.details['server']}, runs lack permission to "
            f"{name_rights(missing)}.",
            hint=f"Ask for this Role: mlbench attach-cluster {name} --namespace {cluster.details['namespace']} --role",
            details={"missing": [right.name for right in missing]},
        )
    details = {**cluster.details, **({"version": version} if version else {})}
    if any(right.resource == "networkpolicies" and not right.allowed for right in rights):
        details["network_policies"] = False
    queues = read_queue_facts(access)
    if queues.queues:
        details["queues"] = list(queues.queues)
    if queues.needs_queue:
        details["needs_queue"] = True
    facts = read_node_facts(access)
    if facts is not None and facts.gpus_per_node:  # an autoscaler may add such nodes later
        details |= {"gpus_per_node": facts.gpus_per_node, "gpu": facts.gpu, "gpu_resource": facts.gpu_resource}
    if (runtime_class := read_runtime_class(access)) is not None:
        details["runtime_class"] = runtime_class
    by_claim = read_device_classes(access) if facts is not None and not facts.gpus_per_node else ()
    if facts is not None and facts.autopilot:
        details["autopilot"] = True
    cluster = replace(cluster, details=details)
    if is_kind(access):
        cluster = replace(cluster, details={**cluster.details, "functional_only": True})
    store.choose_cluster(store.record_cluster(cluster))
    if output == Format.json:
        console.out_json({"cluster": cluster_document(cluster), "rights": [vars(right) for right in rights]})
        return
    if unneeded := [right for right in rights if not right.allowed]:
        console.warn(f"Missing permissions that only some runs need: {name_rights(unneeded)}.")
    if cluster.details.get("functional_only"):
        console.warn("This is a KIND cluster, so results are functional, not a performance measurement.")
    if queues.queues or queues.needs_queue:
        needed = "runs need" if queues.needs_queue else "runs may name"
        console.note(f"Kueue has the queues {', '.join(queues.queues) or '(unknown)'} there: {needed} --queue NAME.")
    if cluster.details.get("autopilot"):
        console.note("This is GKE Autopilot, where pods get only what they request: runs need --num-cpus N --memory N.")
    if facts is not None and facts.gpus_per_node:
        console.note(
            f"Its nodes have up to {counted(facts.gpus_per_node, 'GPU')} each; runs with --gpu have one rank per GPU."
        )
    if by_claim:
        console.warn(
            f"Its nodes offer GPUs only by dynamic resource allocation ({', '.join(by_claim)}), which runs cannot "
            "request. With NVIDIA's device plugin on the nodes they can."
        )
    if facts is not None and facts.devices:
        console.note(
            f"Its nodes offer {', '.join(facts.devices)}. mlbench run --pod-patch FILE requests them: "
            f'spec: {{containers: [{{name: main, resources: {{limits: {{{next(iter(facts.devices))}: "1"}}}}}}]}}'
        )
    console.out(
        f"The cluster {name} is {cluster.details['server']}, namespace {cluster.details['namespace']}; "
        "commands now use it."
    )
