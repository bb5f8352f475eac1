"""Access to one cluster: server, trust, credentials, namespace. Kept in memory and not printed."""

import base64
import ipaddress
import os
import ssl
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from mlbench_cli.errors import CredentialError, UsageError
from mlbench_cli.kube.api import Api
from mlbench_cli.kube.credentials import Credential, CredentialSource, PrivateFile
from mlbench_cli.kube.kubeconfig import impersonation_headers, open_context
from mlbench_cli.kube.official import official

POOL_SIZE = 64  # open connections: as many as logs are followed in parallel
PROXIES = ("http", "https", "socks5", "socks5h")
# Trusted certificates of this system, if OpenSSL's default file is missing.
SYSTEM_BUNDLES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")


@dataclass(frozen=True)
class Access:
    """One cluster's API server and credentials, as returned by `connect()` of providers.

    `server` is a URL; `ca` holds PEM certificates, None is the system's trust store. Credentials come from a `token`
    source (which may also give client certificates), from a client `certificate` with its `key` (PEM), or are missing.
    """

    server: str
    namespace: str = "default"
    ca: bytes | None = field(default=None, repr=False)
    token: CredentialSource | None = field(default=None, repr=False, compare=False)
    certificate: bytes | None = field(default=None, repr=False)
    key: bytes | None = field(default=None, repr=False)
    server_name: str | None = None  # name in the server's certificate, if not the host of `server`
    verify: bool = True
    proxy: str | None = None  # None: from the environment
    impersonation: Mapping[str, Any] = field(default_factory=dict)  # keys of a kubeconfig's user: "as", "as-groups", …

    def __post_init__(self) -> None:
        if not _is_url(self.server, ("http", "https")):
            raise UsageError(f'The address of the cluster, "{self.server}", is not an http or https URL.')

    def client(self, retry_seconds: float | None = None) -> Api:
        """A new client with its own connections that retries requests for this long, by default RETRY_SECONDS.

        Raises CredentialError for certificates that cannot be read.
        """
        official()
        if self.server.startswith("https://"):
            self._check_certificates()
        return Api(self, retry_seconds)

    @classmethod
    def from_kubeconfig(
        cls, path: str | Path | None = None, context: str | None = None, namespace: str | None = None
    ) -> "Access":
        """The access that a kubeconfig describes.

        `path` None reads $KUBECONFIG or ~/.kube/config; in a pod without either, its service account is used. Raises
        UsageError or NotFoundError if the file, the context or an entry is missing or malformed.
        """
        with open_context(path, context) as opened:
            settings = opened.configuration
            return cls(
                server=settings.host,
                namespace=namespace or opened.namespace,
                ca=_read(settings.ssl_ca_cert),
                token=opened.credentials,
                certificate=_read(settings.cert_file),
                key=_read(settings.key_file),
                server_name=settings.tls_server_name,
                verify=settings.verify_ssl,
                proxy=settings.proxy or None,
                impersonation=opened.impersonation,
            )

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """Headers of all requests: who an administrator acts as."""
        return impersonation_headers(self.impersonation)

    def configuration(self) -> Any:
        """The kubernetes.client.Configuration, with our settings for connections and retries.

        The credential is refreshed before each request (`refresh_api_key_hook`). Raises CredentialError if that fails.
        """
        settings = official().kubernetes.client.Configuration(
            retries=False,
            verify_ssl=self.verify,
            tls_server_name=self.server_name,
            connection_pool_maxsize=POOL_SIZE,
            **_proxy_settings(self.proxy, self.server),
        )
        settings.host = self.server
        settings.keep_alive = True  # load balancers in front of API servers close idle connections after minutes
        if self.ca and self.server.startswith("https://"):
            settings.ca_file = PrivateFile(self.ca)
            settings.ssl_ca_cert = settings.ca_file.path
        elif self.server.startswith("https://"):
            settings.ssl_ca_cert = _system_bundle()  # the default for REST; websockets would use certifi's
        static = Credential(certificate=self.certificate, key=self.key)
        settings.refresh_api_key_hook = _CredentialHook(self.token, static)
        settings.refresh_api_key_hook(settings)
        return settings

    def compose_kubeconfig(self, name: str) -> dict[str, Any]:
        """A kubeconfig for this cluster alone, under the name `name`, with the fixed client certificate or the current
        credential."""
        cluster: dict[str, Any] = {"server": self.server}
        if self.ca:
            cluster["certificate-authority-data"] = base64.b64encode(self.ca).decode()
        if self.server_name:
            cluster["tls-server-name"] = self.server_name
        if not self.verify:
            cluster["insecure-skip-tls-verify"] = True
        if self.proxy:
            cluster["proxy-url"] = self.proxy
        user: dict[str, Any] = {}
        if self.certificate and self.key:
            user = _user_entry(Credential(certificate=self.certificate, key=self.key))
        elif self.token:
            user = _user_entry(self.token.credential())
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": name,
            "clusters": [{"name": name, "cluster": cluster}],
            "contexts": [{"name": name, "context": {"cluster": name, "user": name, "namespace": self.namespace}}],
            "users": [{"name": name, "user": {**user, **self.impersonation}}],
        }

    def _check_certificates(self) -> None:
        """Check certificates now: the official client reads them with its first request and does not report the
        reason."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            if self.ca:
                context.load_verify_locations(cadata=self.ca.decode("ascii", "ignore"))  # comments may have any letters
        except (ssl.SSLError, ValueError) as error:
            raise CredentialError(f"The certificate authority of {self.server} cannot be read: {error}.") from None
        try:
            if pem := Credential(certificate=self.certificate, key=self.key).pem:
                file = PrivateFile(pem)
                context.load_cert_chain(file.path)
        except (ssl.SSLError, ValueError) as error:
            raise CredentialError(f"The client certificate for {self.server} cannot be read: {error}.") from None


class _CredentialHook:
    """Writes the current credential into a configuration; called by the official client before each request."""

    def __init__(self, source: CredentialSource | None, static: Credential) -> None:
        self._source = source
        self._static = static
        self._files: dict[bytes, PrivateFile] = {}  # keep all files: connections may still be opened with older ones

    def __call__(self, settings: Any) -> None:
        credential = self._source.credential() if self._source else self._static
        if credential.token and not (credential.token.isascii() and credential.token.isprintable()):
            raise CredentialError(
                f"The token for {settings.host} has a line break, or another character that no header can have.",
                hint="Correct the token in the kubeconfig, or what its exec plugin prints.",
            )
        settings.api_key = {"BearerToken": f"Bearer {credential.token}"} if credential.token else {}
        pem = credential.pem or self._static.pem
        if pem is not None:
            if pem not in self._files:
                self._files[pem] = PrivateFile(pem)
            settings.cert_file = self._files[pem].path


def _user_entry(credential: Credential) -> dict[str, str]:
    entry = {"token": credential.token} if credential.token else {}
    if credential.certificate and credential.key:
        entry["client-certificate-data"] = base64.b64encode(credential.certificate).decode()
        entry["client-key-data"] = base64.b64encode(credential.key).decode()
    return entry


def _proxy_settings(proxy: str | None, server: str) -> dict[str, object]:
    """Proxy arguments of the official configuration. $NO_PROXY does not apply to a proxy from a kubeconfig."""
    variable = None
    if proxy is None:
        proxy, variable = _environment_proxy(server) or (None, None)
    if proxy is None:
        return {"proxy": "", "no_proxy": ""}
    parts = urlsplit(proxy if _is_url(proxy, PROXIES) else "")
    if not parts.hostname or "@" in parts.path + parts.query + parts.fragment:
        named = f'"{proxy.rpartition("@")[2]}"{f", from ${variable}," if variable else ""}'
        raise UsageError(
            f"The proxy of the cluster, {named} is not an http, https or socks5 URL.",
            hint="http://USER:PASSWORD@HOST:PORT, with characters such as # and / of a password as %23 and %2F",
        )
    if parts.scheme.startswith("socks5"):  # with kubectl, the proxy looks up names in both cases
        return {"proxy": f"socks5h:{proxy.partition(':')[2]}", "no_proxy": ""}
    found: dict[str, Any] = {"proxy": proxy, "no_proxy": ""}
    if parts.username:
        words = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        found["proxy_headers"] = official().urllib3.util.make_headers(proxy_basic_auth=words)
    return found


def _is_url(text: str, schemes: Collection[str]) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _system_bundle() -> str | None:
    listed = (ssl.get_default_verify_paths().cafile, *SYSTEM_BUNDLES)
    return next((path for path in listed if path and os.path.isfile(path)), None)


def _read(path: str | None) -> bytes | None:
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{path}, named in the kubeconfig, cannot be read: {error.strerror}.") from None


# --- proxies ---------------------------------------------------------------------------------------------------------


def _environment_proxy(server: str) -> tuple[str, str] | None:
    """The URL of the proxy that the environment names for a server and the name of its variable, by the rules of Go's
    `httpproxy`, which kubectl follows; None without one. $ALL_PROXY is not read.

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
