"""`mlbench serve` and `mlbench get-dashboard-url`."""

import ipaddress
import secrets
import socket
import sys
import threading
import urllib.parse
from pathlib import Path
from typing import Annotated

import typer

from mlbench_cli import console
from mlbench_cli.api import Client
from mlbench_cli.commands._common import Format, Output, complete_clusters, print_answer
from mlbench_cli.config import settings
from mlbench_cli.config.extras import install_hint
from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.runs.defaults import default_cluster
from mlbench_cli.server.config import LOOPBACK, Limits, ServerConfig, read_address, read_token, write_address
from mlbench_cli.server.discovery import keep_discovering
from mlbench_cli.server.in_cluster import find_dashboard
from providers import registry


def serve(
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="port; 0: any free one")] = 0,
    host: Annotated[
        str,
        typer.Option("--host", help="address to listen on; non-loopback addresses need --tls-cert or --insecure"),
    ] = "127.0.0.1",
    names: Annotated[
        list[str] | None,
        typer.Option(
            "--name", metavar="NAME", help="additional host name of this machine that browsers may use; repeatable"
        ),
    ] = None,
    certificate: Annotated[Path | None, typer.Option("--tls-cert", metavar="FILE", help="certificate, PEM")] = None,
    key: Annotated[
        Path | None, typer.Option("--tls-key", metavar="FILE", help="private key of the certificate, PEM")
    ] = None,
    is_insecure: Annotated[
        bool,
        typer.Option(
            "--insecure", help="allow other addresses without TLS; others on the network can then read the token"
        ),
    ] = False,
    allows_actions: Annotated[
        bool, typer.Option("--allow-actions", help="allow the dashboard to start, stop and delete runs")
    ] = False,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", help="show only the runs of this cluster", autocompletion=complete_clusters),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            metavar="FILE",
            help="file with the token of the dashboard; default: a new token at each start",
        ),
    ] = None,
    public_url: Annotated[
        str | None,
        typer.Option(
            "--public-url",
            metavar="URL",
            help="URL under which a proxy or ingress serves the dashboard; needs --token-file",
        ),
    ] = None,
    max_workers: Annotated[
        int | None, typer.Option("--max-workers", metavar="N", min=1, help="maximum workers of a run started here")
    ] = None,
    max_cpus: Annotated[
        float | None, typer.Option("--max-cpus", metavar="N", min=0, help="maximum CPUs per worker of such a run")
    ] = None,
    max_gpus: Annotated[
        int | None, typer.Option("--max-gpus", metavar="N", min=0, help="maximum GPUs per worker of such a run")
    ] = None,
    output: Output = Format.text,
) -> int:
    """Serve the dashboard and its REST API on this machine until Ctrl-C.

    The printed URL contains the token of the dashboard; keep it private. With --cluster, the dashboard shows only the
    runs of that cluster, and finds runs that other machines start within 30 seconds. The dashboard reaches the cluster
    the way all commands do, so the cluster needs no public port.
    """
    try:  # the libraries of the server come with an extra
        import uvicorn

        from mlbench_cli.server.app import make_app
        from mlbench_cli.server.pages import warm_up
    except ImportError as error:
        raise UsageError(f"The dashboard needs {error.name}.", hint=install_hint("dashboard")) from None

    is_loopback = _is_loopback(host)
    if (certificate is None) != (key is None):
        raise UsageError("--tls-cert and --tls-key must be given together.")
    for path in (certificate, key):
        if path is not None and not path.is_file():
            raise NotFoundError(f"There is no file {path}.")
    if not is_loopback and certificate is None and not is_insecure:
        raise UsageError(
            f"--host {host}: without TLS, anyone on the network path can read the token.",
            hint="--tls-cert FILE --tls-key FILE, or ssh -L PORT:127.0.0.1:PORT, or --insecure",
        )
    token = secrets.token_urlsafe(24) if token_file is None else read_token(token_file)
    if public_url is not None:
        public_url = _check_public_url(public_url)
        if token_file is None:
            raise UsageError("--public-url needs --token-file.", hint="--token-file FILE")
    with Client(notice=console.note) as client:  # fail before listening if the store cannot be used
        is_remote = cluster is not None and client.cluster(cluster).provider != "local"
    listener = _listen(host, port)
    bound = listener.getsockname()[1]
    own = LOOPBACK if is_loopback else (f"[{host.strip('[]')}]" if ":" in host else host, *LOOPBACK)
    config = ServerConfig(
        settings.data_dir(),
        bound,
        host=host,
        names=tuple(dict.fromkeys([*(names or ()), *own])),
        allows_actions=allows_actions,
        has_tls=certificate is not None,
        cluster=cluster,
        public_url=public_url,
        limits=Limits(max_workers, max_cpus, max_gpus),
        token=token,
    )
    server = uvicorn.Server(
        uvicorn.Config(
            make_app(config),
            log_level="critical",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            lifespan="off",
            http="h11",
            timeout_keep_alive=10,
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=32 * 1024,
            ssl_certfile=certificate,
            ssl_keyfile=key,
        )
    )
    address = write_address(config)
    try:
        print_answer(output, {"url": config.url, "port": bound}, config.url)
        sys.stdout.flush()  # whoever reads it through a pipe waits for it
        _explain(is_loopback, allows_actions, certificate is not None)
        threading.Thread(target=warm_up, args=(config,), daemon=True).start()
        if is_remote:
            threading.Thread(target=keep_discovering, args=(config,), daemon=True).start()
        server.run(sockets=[listener])
    finally:
        address.unlink(missing_ok=True)
    return 0


def get_dashboard_url(output: Output = Format.text) -> None:
    """Print the URL of the dashboard: of the one that runs on this machine, else of the current cluster's.

    The dashboard of a cluster is one that the Helm chart charts/mlbench has installed. Its URL needs the token that it
    was installed with.
    """
    found = read_address(settings.data_dir())
    if found is not None:
        print_answer(output, {"url": found.url, "pid": found.pid}, found.url)
        return
    with Client(notice=console.note) as client:
        cluster = default_cluster(client.store)
    if cluster.engine != "kubernetes":
        raise NotFoundError("No dashboard is running on this machine.", hint="mlbench serve")
    there = find_dashboard(registry.load(cluster.provider).connect(cluster))
    if there is None:
        raise NotFoundError(
            f"No dashboard is running on this machine or in the cluster {cluster.name}.",
            hint="mlbench serve, or install charts/mlbench into the cluster",
        )
    document = {"url": there.url, "cluster": cluster.name, "namespace": there.namespace, "forward": there.forward}
    print_answer(output, document, there.url)
    if there.forward:
        console.note(f"It has no address outside the cluster. To reach it: {there.forward}")
    secret = (
        f"kubectl --namespace {there.namespace} get secret {there.secret} -o jsonpath='{{.data.token}}' | base64 -d"
    )
    console.note(f"Add its token as ?token=TOKEN. To print it: {secret}")


def _explain(is_loopback: bool, allows_actions: bool, has_tls: bool) -> None:
    if not is_loopback:
        how = "with TLS" if has_tls else "WITHOUT TLS: anyone who can read the traffic can read the token"
        console.warn(f"Other machines can reach the dashboard, {how}.")
    kind = (
        "It can start, stop and delete runs."
        if allows_actions
        else "It is read-only; start it with --allow-actions to control runs from it."
    )
    console.note(f"Open the URL above. {kind} Press Ctrl-C to stop it.")


def _check_public_url(url: str) -> str:
    """The URL without a slash at its end. Raises UsageError unless it is scheme, host and port only."""
    try:
        parts = urllib.parse.urlsplit(url.rstrip("/"))
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.username is None
        _ = parts.port
    except ValueError:
        is_usable = False
    if not is_usable or parts.path or parts.query or parts.fragment:
        raise UsageError(
            f"--public-url {url[:100]} is not a URL of scheme, host and port.", hint="https://mlbench.example.com"
        )
    usual = ":443" if parts.scheme == "https" else ":80"  # which browsers leave out
    return f"{parts.scheme}://{parts.netloc.removesuffix(usual)}"


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket, so that the address is known before anything is printed. Raises UsageError."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host.strip("[]"), port))
        listener.listen(256)  # so that whoever reads the address is not refused
    except OSError as error:
        raise UsageError(
            f"The dashboard cannot listen on {host}:{port}: {error.strerror or error}.", hint="mlbench serve --port 0"
        ) from None
    return listener


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
