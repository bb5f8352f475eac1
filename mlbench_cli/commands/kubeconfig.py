"""`mlbench kubeconfig export`: for kubectl and its like. The only place that writes a kubeconfig for others to use."""

import base64
import json
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from mlbench_cli import console
from mlbench_cli.errors import UsageError
from mlbench_cli.kube.access import Access
from mlbench_cli.store import Cluster, Store

HELP_NAMES = {"help_option_names": ["-h", "--help"]}
TOKEN_SECONDS = 300  # after which kubectl asks again; tokens of all clouds live longer

Name = Annotated[str | None, typer.Argument(metavar="[NAME]", help="a cluster; default: the current one")]

kubeconfig = typer.Typer(rich_markup_mode=None, context_settings=HELP_NAMES, no_args_is_help=True, add_completion=False)


@kubeconfig.callback()
def _group() -> None:
    """Use a cluster with kubectl."""


@kubeconfig.command(context_settings=HELP_NAMES)
def export(
    name: Name = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="write it there, readable by you only")] = None,
    force: Annotated[bool, typer.Option("--force", help="replace the file")] = False,
) -> None:
    """Print a kubeconfig for a cluster, or write it to a file. It gives access: keep it to yourself."""
    cluster, access = _access(name)
    text = _dump(_document(cluster, access))
    if file is None:
        console.out(text.rstrip())
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
    console.note(f"Next: kubectl --kubeconfig {file} get nodes")


@kubeconfig.command(context_settings=HELP_NAMES)
def token(name: Name = None) -> None:
    """Print a short-lived token as a credential plugin of kubectl does; exported kubeconfigs call this."""
    cluster, access = _access(name)
    if access.token is None:
        raise UsageError(f'The cluster "{cluster.name}" does not use tokens.')
    expires = datetime.fromtimestamp(time.time() + TOKEN_SECONDS, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    status = {"token": access.token(), "expirationTimestamp": expires}
    console.out(
        json.dumps({"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": status})
    )


def _access(name: str | None) -> tuple[Cluster, Access]:
    from providers import registry

    store = Store()
    cluster = store.cluster(name) if name else store.current_cluster
    return cluster, registry.load(cluster.provider).connect(cluster)


def _document(cluster: Cluster, access: Access) -> dict[str, Any]:
    name = f"mlbench-{cluster.name}"
    server: dict[str, Any] = {"server": access.server}
    if access.ca:
        server["certificate-authority-data"] = base64.b64encode(access.ca).decode()
    if access.server_name:
        server["tls-server-name"] = access.server_name
    if not access.verify:
        server["insecure-skip-tls-verify"] = True
    if access.proxy:
        server["proxy-url"] = access.proxy
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": name,
        "clusters": [{"name": name, "cluster": server}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name, "namespace": access.namespace}}],
        "users": [{"name": name, "user": _user(cluster, access)}],
    }


def _user(cluster: Cluster, access: Access) -> dict[str, Any]:
    if access.certificate and access.key:
        return {
            "client-certificate-data": base64.b64encode(access.certificate).decode(),
            "client-key-data": base64.b64encode(access.key).decode(),
        }
    if access.token is None:
        return {}
    plugin: dict[str, Any] = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "interactiveMode": "Never",
        "command": sys.executable,
        "args": ["-m", "mlbench_cli", "kubeconfig", "token", cluster.name],
    }
    if home := os.environ.get("MLBENCH_HOME"):
        plugin["env"] = [{"name": "MLBENCH_HOME", "value": str(Path(home).expanduser().absolute())}]
    return {"exec": plugin}


def _dump(document: dict[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(document, sort_keys=False)
