"""`mlbench serve` and `mlbench get-dashboard-url`."""

import ipaddress
import socket
import threading
from pathlib import Path
from typing import Annotated

import typer

from mlbench_cli import console
from mlbench_cli.api import Client
from mlbench_cli.commands._common import Format, Output, complete_clusters
from mlbench_cli.config import settings
from mlbench_cli.config.extras import install_hint
from mlbench_cli.errors import NotFoundError, UsageError


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
            help='tokens of other people, a line each: "read TOKEN" or "act TOKEN"; act needs --allow-actions',
        ),
    ] = None,
    output: Output = Format.text,
) -> int:
    """Serve the dashboard and its REST API on this machine until Ctrl-C.

    The printed URL contains a new token at each start; keep it private. With --cluster, the dashboard shows only the
    runs of that cluster, and finds runs that other machines start within 30 seconds. The dashboard reaches the cluster
    the way all commands do, so the cluster needs no public port.
    """
    try:
        import uvicorn

        from mlbench_cli.server.app import make_app
        from mlbench_cli.server.connections import GuardedProtocol
        from mlbench_cli.server.discovery import keep_discovering
        from mlbench_cli.server.pages import warm_up
    except ImportError as error:
        raise UsageError(f"The dashboard needs {error.name}.", hint=install_hint("dashboard")) from None
    from mlbench_cli.server.config import LOOPBACK, ServerConfig, read_grants, write_address

    is_loopback = _is_loopback(host)
    if (certificate is None) != (key is None):
        raise UsageError("--tls-cert and --tls-key belong together.")
    for path in (certificate, key):
        if path is not None and not path.is_file():
            raise NotFoundError(f"There is no file {path}.")
    if not is_loopback and certificate is None and not is_insecure:
        raise UsageError(
            f"--host {host}: without TLS everybody on the way can read the token.",
            hint="--tls-cert FILE --tls-key FILE, or ssh -L PORT:127.0.0.1:PORT, or --insecure",
        )
    grants = read_grants(token_file) if token_file is not None else ()
    with Client(notice=console.note) as client:  # a store that cannot be used is a reason not to begin
        is_remote = cluster is not None and client.cluster(cluster).provider != "local"
    listener = _listen(host, port)
    bound = listener.getsockname()[1]
    own = LOOPBACK if is_loopback else (_bracket(host), *LOOPBACK)
    config = ServerConfig(
        settings.data_dir(),
        bound,
        host=host,
        names=tuple(dict.fromkeys([*(names or ()), *own])),
        allows_actions=allows_actions,
        has_tls=certificate is not None,
        cluster=cluster,
        grants=grants,
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
            http=GuardedProtocol,
            timeout_keep_alive=10,
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=32 * 1024,
            ssl_certfile=certificate,
            ssl_keyfile=key,
        )
    )
    address = write_address(config)
    try:
        if output is Format.json:
            console.out_json({"url": config.url, "client_url": config.client_url, "port": bound})
        else:
            console.out(config.url)
        _explain(config.client_url, is_loopback, allows_actions, certificate is not None)
        threading.Thread(target=warm_up, args=(config,), daemon=True).start()
        if is_remote:
            threading.Thread(target=keep_discovering, args=(config,), daemon=True).start()
        server.run(sockets=[listener])
    finally:
        address.unlink(missing_ok=True)
    return 0


def get_dashboard_url(output: Output = Format.text) -> None:
    """Print the URL of the dashboard that is running on this machine, with its token."""
    from mlbench_cli.server.config import read_address

    found = read_address(settings.data_dir())
    if found is None:
        raise NotFoundError("No dashboard runs on this machine.", hint="mlbench serve")
    if output is Format.json:
        console.out_json({"url": found.url, "client_url": found.client_url, "pid": found.pid})
    else:
        console.out(found.url)


def _explain(client_url: str, is_loopback: bool, allows_actions: bool, has_tls: bool) -> None:
    if not is_loopback:
        how = "with TLS" if has_tls else "WITHOUT TLS: whoever can read the traffic has the token"
        console.warn(f"The dashboard can be reached from other machines, {how}.")
    kind = (
        "It may start, stop and delete runs."
        if allows_actions
        else "It is read-only; --allow-actions lets it start runs."
    )
    console.note(f"Open the address above. {kind} Ctrl-C ends it.")
    console.note(f'Client of MLBench 3: ApiClient(in_cluster=False, url="{client_url}")')


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


def _bracket(host: str) -> str:
    return f"[{host.strip('[]')}]" if ":" in host else host
