"""Logging in as people do: plugins that give client certificates, OpenID Connect, service accounts, proxies."""

import base64
import json
import ssl
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs

import pytest
import yaml

from mlbench_cli.errors import CredentialError, UsageError
from mlbench_cli.kube import api as api_module
from mlbench_cli.kube import logins
from mlbench_cli.kube.access import Access
from mlbench_cli.kube.api import ApiError
from providers.attached import new_attached_cluster
from tests.contract.kube.exec import execute
from tests.fakes.certificates import server_context, write_certificate
from tests.fakes.cutting_proxy import SocksProxy
from tests.fakes.kube_api import KubeApi
from tests.fakes.silent import Silent

PODS = "/api/v1/namespaces/default/pods"
FAR = "2999-01-01T00:00:00Z"
PAST = "2001-01-01T00:00:00Z"


class World:
    """A server that demands client certificates, and a plugin that gives one of two."""

    def __init__(self, folder: Path, most: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> None:
        self.folder = folder
        self.ca = write_certificate(folder / "server.pem", "server")
        self.clients = {name: write_certificate(folder / f"{name}.pem", name) for name in ("one", "two")}
        self.trusted = ["one", "two"]
        self.most = most
        self.server = KubeApi(tls=self.context)
        self.kubeconfig = folder / "config"

    def context(self) -> ssl.SSLContext:
        context = server_context(self.folder / "server.pem")
        context.maximum_version = self.most
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata="".join(self.clients[name].decode() for name in self.trusted))
        return context

    def answer(self, name: str, expires: str | None) -> str:
        """What the plugin prints to give the certificate of `name`."""
        pair = (self.folder / f"{name}.pem").read_text()
        certificate = self.clients[name].decode()
        status = {"clientCertificateData": certificate, "clientKeyData": pair.removeprefix(certificate)}
        if expires:
            status["expirationTimestamp"] = expires
        return json.dumps({"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": status})

    def write_plugin(self, *answers: str) -> None:
        """A plugin that gives these answers one after the other, the last one again and again."""
        for number, answer in enumerate(answers, 1):
            (self.folder / f"answer-{number}").write_text(answer)
        script = self.folder / "login"
        script.write_text(
            f"#!/bin/sh\ncd {self.folder}\necho run >> runs\nn=$(wc -l < runs)\n"
            f"[ -e answer-$n ] || n={len(answers)}\ncat answer-$n\n"
        )
        script.chmod(0o755)
        plugin = {"apiVersion": "client.authentication.k8s.io/v1", "command": "./login", "interactiveMode": "Never"}
        write_kubeconfig(self.kubeconfig, self.server.url, self.ca, {"exec": plugin})

    @property
    def runs(self) -> int:
        return len((self.folder / "runs").read_text().splitlines())


def write_kubeconfig(path: Path, server: str, ca: bytes | None, user: dict[str, Any]) -> None:
    cluster = {"server": server} | ({"certificate-authority-data": base64.b64encode(ca).decode()} if ca else {})
    document = {
        "current-context": "c",
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    }
    path.write_text(yaml.safe_dump(document))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    with world.server:
        yield world


# --- client certificates of plugins -----------------------------------------------------------------------------------


def test_a_plugin_may_give_a_client_certificate(world: World, tmp_path: Path) -> None:
    world.write_plugin(world.answer("one", FAR))
    (tmp_path / "results").mkdir()
    world.server.folders["p"] = tmp_path / "results"
    access = Access.from_kubeconfig(world.kubeconfig)
    assert not (tmp_path / "runs").exists()
    with access.client() as api:
        assert api.get(PODS)["items"] == []
        api.create(PODS, {"metadata": {"name": "p", "labels": {"a": "b"}}})
    assert execute(access, "p", ["echo", "hello"]) == b"hello\n"
    assert set(world.server.subjects) == {"one"}
    assert world.runs == 1


def test_an_expired_certificate_is_fetched_again_for_new_connections(world: World) -> None:
    world.write_plugin(world.answer("one", PAST), world.answer("two", FAR))
    with Access.from_kubeconfig(world.kubeconfig).client() as api:
        api.get(PODS)
        api.get(PODS)
        api.get(PODS)
    assert world.server.subjects == ["one", "two", "two"]
    assert world.runs == 2


def test_a_certificate_that_the_server_refuses_is_fetched_again_once(tmp_path: Path) -> None:
    world = World(tmp_path, most=ssl.TLSVersion.TLSv1_2)  # of 1.3 the client learns of it with the first read only
    world.trusted = ["two"]
    world.write_plugin(world.answer("one", None), world.answer("two", None))
    with world.server, Access.from_kubeconfig(world.kubeconfig).client() as api:
        assert api.request("GET", PODS, retry_seconds=0)["items"] == []
    assert world.server.subjects == ["two"]
    assert world.runs == 2


def test_a_kubeconfig_for_helm_holds_the_certificate_of_the_plugin(world: World) -> None:
    world.write_plugin(world.answer("one", FAR))
    document = Access.from_kubeconfig(world.kubeconfig).compose_kubeconfig("helm")
    (user,) = document["users"]
    assert base64.b64decode(user["user"]["client-certificate-data"]) == world.clients["one"]
    other = world.folder / "other"
    other.write_text(json.dumps(document))
    with Access.from_kubeconfig(other).client() as api:
        api.get(PODS)
    assert world.runs == 1


@pytest.mark.parametrize("broken", [{"args": 5}, {"env": ["a"]}, {"env": [{"name": "a"}]}])
def test_a_malformed_plugin_entry_is_reported(world: World, broken: dict[str, object]) -> None:
    write_kubeconfig(world.kubeconfig, world.server.url, world.ca, {"exec": {"command": "true", **broken}})
    with Access.from_kubeconfig(world.kubeconfig).client() as api, pytest.raises(UsageError, match="malformed"):
        api.get(PODS)


# --- the official client itself ---------------------------------------------------------------------------------------


def test_classes_of_the_official_client_work_with_an_access_and_renew_its_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kubernetes.client import ApiClient, CoreV1Api

    tokens = iter(("first", "second"))
    with KubeApi(tokens=lambda: {"first", "second"}) as server:
        clock = SimpleNamespace(time=lambda: 1000.0)
        monkeypatch.setattr("mlbench_cli.kube.credentials.time", clock)
        access = server.access_with(lambda: (next(tokens), clock.time() + 60))
        with ApiClient(access.configuration()) as client:
            assert CoreV1Api(client).list_namespaced_pod("default").items == []
            clock.time = lambda: 1046.0  # before it ends: requests may take a while
            assert CoreV1Api(client).list_namespaced_pod("default").items == []
        assert next(tokens, None) is None


def test_a_handshake_that_nobody_answers_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_module, "READ_SECONDS", 0.3)
    silent = Silent()
    with pytest.raises(ApiError, match=r"does not answer: nothing arrived within 0\.3 s"):
        execute(Access(silent.url), "p", ["true"])
    silent.close()


# --- proxies ----------------------------------------------------------------------------------------------------------


def test_a_proxy_of_the_kubeconfig_is_used_whatever_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with KubeApi() as server:  # it takes whole URLs, as a proxy does
        with Access("http://nowhere.invalid", proxy=server.url).client() as api:
            assert api.get(PODS)["items"] == []
        assert server.requests[f"GET {PODS}"] == 1


def test_a_proxy_gets_the_login_of_its_url() -> None:
    with KubeApi() as server:
        proxy = server.url.replace("://", "://LAB%5Cme:p%40ss%23@")
        with Access("http://nowhere.invalid", proxy=proxy).client() as api:
            api.get(PODS)
        words = {value for _, sent in server.headers for name, value in sent if name.lower() == "proxy-authorization"}
        assert words == {"Basic " + base64.b64encode(b"LAB\\me:p@ss#").decode()}


@pytest.mark.parametrize("scheme", ["socks5", "socks5h"])
def test_a_socks_proxy_looks_up_the_server_and_carries_both_kinds_of_connection(
    https: tuple[KubeApi, bytes], scheme: str
) -> None:
    """That of `ssh -D`, as Kubernetes' documentation has it for private clusters."""
    server, ca = https
    with SocksProxy("127.0.0.1", int(server.url.rpartition(":")[2])) as proxy:
        url = f"{scheme}://127.0.0.1:{proxy.port}"
        assert works(Access("https://private.invalid:6443", ca=ca, server_name="127.0.0.1", proxy=url))
    assert set(proxy.asked) == {"private.invalid:6443"}


@pytest.mark.parametrize(
    "proxy", ["socks4://user:secret@p:1080", "http://user:secret@p:x", "http://user:of@secret#secret@p:1"]
)
def test_a_proxy_of_another_kind_is_refused_without_its_password(proxy: str) -> None:
    with Access("https://c.invalid", proxy=proxy).client() as api, pytest.raises(UsageError, match='"p:') as caught:
        api.get(PODS)
    assert "secret" not in str(caught.value)


# --- TLS --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def https(tmp_path: Path) -> Iterator[tuple[KubeApi, bytes]]:
    """A server whose certificate is for 127.0.0.1, and its authority."""
    ca = write_certificate(tmp_path / "server.pem", "server")
    with KubeApi(tls=lambda: server_context(tmp_path / "server.pem")) as server:
        server.folders["p"] = tmp_path
        yield server, ca


def works(access: Access) -> bool:
    """Whether both kinds of connection are made."""
    with access.client() as api:
        api.request("GET", PODS, retry_seconds=0)
    return execute(access, "p", ["echo", "hello"]) == b"hello\n"


def test_the_name_in_the_certificate_may_be_given(https: tuple[KubeApi, bytes]) -> None:
    server, ca = https
    address = server.url.replace("127.0.0.1", "localhost")
    assert works(Access(server.url, ca=ca))
    assert works(Access(server.url, ca="# Főtanúsítvány\n".encode() + ca))  # bundles name their authorities
    assert works(Access(address, ca=ca, server_name="127.0.0.1"))
    with pytest.raises(ApiError, match="CERTIFICATE_VERIFY_FAILED") as caught:
        works(Access(address, ca=ca))
    assert "tls-server-name" in str(caught.value.hint)


def test_a_certificate_is_verified_unless_the_kubeconfig_says_otherwise(
    https: tuple[KubeApi, bytes], recwarn: pytest.WarningsRecorder
) -> None:
    server, _ = https
    assert works(Access(server.url, verify=False))
    assert not [warning for warning in recwarn if "Unverified" in str(warning.message)]
    with pytest.raises(ApiError, match="CERTIFICATE_VERIFY_FAILED"):
        works(Access(server.url))
    with pytest.raises(ApiError, match="CERTIFICATE_VERIFY_FAILED"):
        execute(Access(server.url), "p", ["true"])


def test_a_certificate_authority_of_old_clusters_is_accepted_where_python_checks_strictly(
    https: tuple[KubeApi, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Python 3.13 does: the certificate of this server lacks the key identifiers, as those of old clusters do."""
    import urllib3.util.ssl_ as tls

    lenient = tls.create_urllib3_context

    def strict(*words: Any, **named: Any) -> ssl.SSLContext:
        context = lenient(*words, **named)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(tls, "create_urllib3_context", strict)
    monkeypatch.setattr("urllib3.connection.create_urllib3_context", strict)
    server, ca = https
    assert works(Access(server.url, ca=ca))
    with pytest.raises(ApiError, match="CERTIFICATE_VERIFY_FAILED") as caught:  # but another's is not
        works(Access(server.url))
    assert "The certificate of the server is not trusted" in str(caught.value.hint)


def test_a_proxy_that_refuses_is_named(https: tuple[KubeApi, bytes]) -> None:
    server, ca = https
    with pytest.raises(ApiError) as caught:
        works(Access(server.url, ca=ca, proxy="http://me:secret@127.0.0.1:9"))
    assert "through the proxy 127.0.0.1:9: Failed to establish" in caught.value.message
    assert "HTTPS_PROXY" in str(caught.value.hint)


# --- a pod's service account ------------------------------------------------------------------------------------------


def test_in_a_pod_without_a_kubeconfig_the_service_account_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ca = write_certificate(tmp_path / "server.pem", "server")
    account = tmp_path / "account"
    account.mkdir()
    (account / "token").write_text("first")
    (account / "ca.crt").write_bytes(ca)
    (account / "namespace").write_text("benchmarks")
    valid = {"first"}
    with KubeApi(tokens=lambda: valid, tls=lambda: server_context(tmp_path / "server.pem")) as server:
        monkeypatch.setattr(logins, "SERVICE_ACCOUNT", account)
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", server.url.rpartition(":")[2])
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.delenv("KUBECONFIG", raising=False)
        access = Access.from_kubeconfig()
        assert (access.server, access.namespace, access.ca) == (server.url, "benchmarks", ca)
        with access.client() as api:
            api.get(PODS)
            (account / "token").write_text("second")
            valid.clear()
            valid.add("second")
            api.get(PODS)


def test_attaching_in_a_pod_keeps_no_kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in (("token", "t"), ("ca.crt", "x"), ("namespace", "n")):
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(logins, "SERVICE_ACCOUNT", tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    details = new_attached_cluster("x", None, None, None).details
    assert details == {"kubeconfig": None, "context": None, "namespace": "n", "server": "https://[::1]:443"}


# --- OpenID Connect ---------------------------------------------------------------------------------------------------


class Provider:
    """An OpenID provider that takes each refresh token once."""

    def __init__(self, folder: Path) -> None:
        self.ca = write_certificate(folder / "provider.pem", "provider")
        self.valid = "refresh-0"
        self.count = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(200, {"token_endpoint": f"{outer.url}/token"})

            def do_POST(self) -> None:
                given = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())["refresh_token"][0]
                if given != outer.valid:
                    return self._answer(400, {"error": "invalid_grant", "error_description": "token was used"})
                outer.count += 1
                outer.valid = f"refresh-{outer.count}"
                return self._answer(200, outer.grant())

            def _answer(self, status: int, document: dict[str, object]) -> None:
                data = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.socket = server_context(folder / "provider.pem").wrap_socket(self._http.socket, server_side=True)
        self.url = f"https://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def grant(self) -> dict[str, object]:
        return {"access_token": "a", "id_token": self.token(3600), "refresh_token": self.valid, "token_type": "Bearer"}

    def token(self, seconds: float) -> str:
        """A token that ends in so many seconds; its signature is nobody's business here."""
        parts = ({"alg": "none"}, {"exp": int(time.time() + seconds), "n": self.count})
        encoded = (base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts)
        return ".".join(encoded) + ".signature"

    def user(self, token: str, refresh: str) -> dict[str, Any]:
        settings = {
            "idp-issuer-url": self.url,
            "idp-certificate-authority-data": base64.b64encode(self.ca).decode(),
            "client-id": "mlbench",
            "client-secret": "s",
            "id-token": token,
            "refresh-token": refresh,
        }
        return {"auth-provider": {"name": "oidc", "config": settings}}


@pytest.fixture
def provider(tmp_path: Path) -> Iterator[Provider]:
    provider = Provider(tmp_path)
    yield provider
    provider.close()


def test_a_token_of_openid_connect_is_renewed_and_kept_for_kubectl(provider: Provider, tmp_path: Path) -> None:
    path = tmp_path / "config"
    with KubeApi(tokens=lambda: {token_in(path)} if provider.count else set()) as server:
        write_kubeconfig(path, server.url, None, provider.user(provider.token(-60), "refresh-0"))
        for _ in range(2):  # the second time with what was written
            with Access.from_kubeconfig(path).client() as api:
                assert api.get(PODS)["items"] == []
    assert provider.count == 1
    settings = yaml.safe_load(path.read_text())["users"][0]["user"]["auth-provider"]["config"]
    assert settings["refresh-token"] == "refresh-1"


def token_in(path: Path) -> str:
    return str(yaml.safe_load(path.read_text())["users"][0]["user"]["auth-provider"]["config"]["id-token"])


def test_a_login_that_has_ended_is_reported_in_the_providers_words(provider: Provider, tmp_path: Path) -> None:
    path = tmp_path / "config"
    write_kubeconfig(path, "https://c.invalid", None, provider.user(provider.token(-60), "used"))
    with Access.from_kubeconfig(path).client() as api, pytest.raises(CredentialError, match="token was used") as caught:
        api.get(PODS)
    assert "kubectl" in str(caught.value.hint)


def test_a_provider_that_does_not_answer_ends_the_login(
    provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logins, "OPENID_SECONDS", 0.3)
    silent = Silent()
    provider.url = silent.url
    path = tmp_path / "config"
    write_kubeconfig(path, "https://c.invalid", None, provider.user(provider.token(-60), "refresh-0"))
    with Access.from_kubeconfig(path).client() as api, pytest.raises(CredentialError, match="did not answer within"):
        api.get(PODS)
    silent.close()


def test_keys_of_a_kubeconfig_touch_no_disk(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = world.clients["one"]
    key = (world.folder / "one.pem").read_bytes().removeprefix(certificate)
    inline = {"client-certificate-data": certificate, "client-key-data": key}
    user = {name: base64.b64encode(data).decode() for name, data in inline.items()}
    write_kubeconfig(world.kubeconfig, world.server.url, world.ca, user)
    monkeypatch.setattr("tempfile.tempdir", "/nonexistent")  # where temporary files would go
    access = Access.from_kubeconfig(world.kubeconfig)
    assert (access.certificate, access.key) == (certificate, key)
    with access.client() as api:
        api.get(PODS)
    assert world.server.subjects == ["one"]
