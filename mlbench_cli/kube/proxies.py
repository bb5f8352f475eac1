"""The proxy that the environment names for a server, by the rules of Go's `httpproxy`, which kubectl follows."""

import ipaddress
import os
from urllib.parse import urlsplit


def environment_proxy(server: str) -> tuple[str, str] | None:
    """The URL of the proxy and the name of its variable; None without one. $ALL_PROXY is not read.

    This machine's own addresses need no proxy; a proxy without a scheme is an http proxy.
    """
    parts = urlsplit(server)
    host, port = parts.hostname or "", str(parts.port or (443 if parts.scheme == "https" else 80))
    variable = "HTTPS_PROXY" if parts.scheme == "https" else "HTTP_PROXY"
    name = next((name for name in (variable, variable.lower()) if os.environ.get(name)), None)
    if name is None or host == "localhost" or _is_loopback(host) or _is_excepted(host, port):
        return None
    proxy = os.environ[name].strip()
    return (proxy if "://" in proxy else f"http://{proxy}"), name


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_excepted(host: str, port: str) -> bool:
    """Whether $NO_PROXY names the host: "*", a name with its subdomains, ".name", an address, a network, each with or
    without a port."""
    listed = os.environ.get("NO_PROXY") or os.environ.get("no_proxy") or ""
    return any(_matches(entry.strip().lower(), host.lower().rstrip("."), port) for entry in listed.split(","))


def _matches(entry: str, host: str, port: str) -> bool:
    if not entry or entry == "*":
        return entry == "*"
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry.strip("[]"), strict=False)
    except ValueError:
        pass  # one of them is a name, or the entry has a port
    name, colon, wanted = entry.rpartition(":")
    if colon and wanted.isdigit():
        if wanted != port:
            return False
        entry = name.strip("[]")
    if entry.startswith(("*.", ".")):
        return host.endswith(entry.lstrip("*"))
    return host == entry or host.endswith(f".{entry}")
