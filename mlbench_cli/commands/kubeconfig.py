"""`mlbench kubeconfig export`: for kubectl and similar tools. The only place that writes a kubeconfig for other
programs.
"""

import json
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from mlbench_cli import console
from mlbench_cli.commands._common import Format, Output, complete_clusters
from mlbench_cli.errors import UsageError
from mlbench_cli.kube.access import Access
from mlbench_cli.model.run import Cluster
from mlbench_cli.runs.defaults import default_cluster
from mlbench_cli.storage.store import Store

TOKEN_SECONDS = 300  # after which kubectl asks again; tokens of all clouds live longer

Name = Annotated[
    str | None,
    typer.Argument(metavar="[NAME]", help="cluster; default: the default cluster", autocompletion=complete_clusters),
]

kubeconfig = typer.Typer(rich_markup_mode=None, no_args_is_help=True, add_completion=False)


@kubeconfig.callback()
def _group() -> None:
    """Use a cluster with kubectl."""


@kubeconfig.command()
def export(
    name: Name = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="write to this file (mode 600) instead of stdout")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="overwrite the file")] = False,
    output: Output = Format.text,
) -> None:
    """Print a kubeconfig for a cluster, or write it to a file. It gives access: keep it to yourself."""
    cluster, access = _access(name)
    document = access.compose_kubeconfig(f"mlbench-{cluster.name}", _plugin(cluster) if access.token else None)
    text = _dump(document)
    if file is None:
        console.out(json.dumps(document, indent=2) if output == Format.json else text.rstrip())
        return
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | (0 if force else os.O_EXCL)
    try:
        with open(os.open(file, flags, 0o600), "w") as stream:
            os.fchmod(stream.fileno(), 0o600)
            stream.write(text)
    except FileExistsError:
        raise UsageError(f"The file {file} exists.", hint="Choose another one, or add --force.") from None
    except OSError as error:
        raise UsageError(f"The file {file} cannot be written: {error.strerror}.") from None
    if output == Format.json:
        console.out_json({"cluster": cluster.name, "file": str(file.absolute())})
    console.note(f"Next: kubectl --kubeconfig {file} get nodes")


@kubeconfig.command()
def token(name: Name = None) -> None:
    """Print short-lived credentials as a credential plugin of kubectl does; exported kubeconfigs call this."""
    cluster, access = _access(name)
    if access.token is None:
        raise UsageError(f'The cluster "{cluster.name}" does not use tokens.')
    credential = access.token.credential()
    expires = datetime.fromtimestamp(time.time() + TOKEN_SECONDS, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    status = {"expirationTimestamp": expires}
    if credential.token:
        status["token"] = credential.token
    if credential.certificate and credential.key:
        status["clientCertificateData"] = credential.certificate.decode()
        status["clientKeyData"] = credential.key.decode()
    console.out(
        json.dumps({"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": status})
    )


def _access(name: str | None) -> tuple[Cluster, Access]:
    from providers import registry

    store = Store(notice=console.note)
    cluster = store.cluster(name) if name else default_cluster(store)
    return cluster, registry.load(cluster.provider).connect(cluster)


def _plugin(cluster: Cluster) -> dict[str, object]:
    """What has kubectl ask mlbench for a token each time."""
    plugin: dict[str, Any] = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "interactiveMode": "Never",
        "command": sys.executable,
        "args": ["-m", "mlbench_cli", "kubeconfig", "token", cluster.name],
    }
    if home := os.environ.get("MLBENCH_HOME"):
        plugin["env"] = [{"name": "MLBENCH_HOME", "value": str(Path(home).expanduser().absolute())}]
    return {"exec": plugin}


def _dump(document: dict[str, object]) -> str:
    import yaml

    return yaml.safe_dump(document, sort_keys=False)
