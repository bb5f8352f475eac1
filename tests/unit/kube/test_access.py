"""What an access hands to the official client and to other tools, and commands that run in pods."""

import base64
import json
import ssl
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import websocket

from mlbench_cli.errors import UsageError
from mlbench_cli.kube import access as module
from mlbench_cli.kube import kubeconfig
from mlbench_cli.kube.access import Access
from mlbench_cli.kube.api import ApiError
from mlbench_cli.kube.credentials import Credential, CredentialSource, Token
from mlbench_cli.kube.deadline import call_with_deadline
from mlbench_cli.kube.execute import ExecBroken, Executed, execute

SERVER = "https://c:6443"


def base64_of(text: bytes) -> str:
    return base64.b64encode(text).decode()


# --- kubeconfigs for other tools ------------------------------------------------------------------------------------


def test_a_kubeconfig_has_all_that_another_tool_needs() -> None:
    access = Access(
        SERVER,
        "team-a",
        ca=b"CA",
        token=Token(lambda: ("secret", None)),
        server_name="api",
        verify=False,
        proxy="http://p:1",
    )
    assert access.compose_kubeconfig("lab") == {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "lab",
        "clusters": [
            {
                "name": "lab",
                "cluster": {
                    "server": SERVER,
                    "certificate-authority-data": base64_of(b"CA"),
                    "tls-server-name": "api",
                    "insecure-skip-tls-verify": True,
                    "proxy-url": "http://p:1",
                },
            }
        ],
        "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "lab", "namespace": "team-a"}}],
        "users": [{"name": "lab", "user": {"token": "secret"}}],
    }


def test_a_kubeconfig_says_nothing_about_what_is_as_usual() -> None:
    found = Access(SERVER).compose_kubeconfig("lab")
    assert found["clusters"][0]["cluster"] == {"server": SERVER}
    assert found["contexts"][0]["context"]["namespace"] == "default"
    assert found["users"][0]["user"] == {}


PAIR = {"client-certificate-data": base64_of(b"C"), "client-key-data": base64_of(b"K")}
PLUGIN = {"exec": {"command": "mlbench"}}


@pytest.mark.parametrize(
    ("fixed", "fetched", "given", "user"),
    [
        ((b"C", b"K"), None, None, PAIR),
        ((b"C", b"K"), Credential(token="t"), PLUGIN, PAIR),  # a fixed certificate always
        ((b"C", None), None, PLUGIN, PLUGIN),
        ((None, None), Credential(token="t"), PLUGIN, PLUGIN),
        ((None, None), Credential(token="t"), {}, {}),
        ((None, None), Credential(token="t"), None, {"token": "t"}),
        ((None, None), Credential(certificate=b"C", key=b"K"), None, PAIR),
        ((None, None), Credential(token="t", certificate=b"C", key=b"K"), None, {"token": "t", **PAIR}),
        ((None, None), Credential(token="t", certificate=b"C"), None, {"token": "t"}),
    ],
)
def test_the_login_of_a_kubeconfig_is_a_certificate_or_what_is_given_or_current(
    fixed: tuple[bytes | None, bytes | None],
    fetched: Credential | None,
    given: dict[str, Any] | None,
    user: dict[str, Any],
) -> None:
    source = CredentialSource(lambda: fetched) if fetched else None
    access = Access(SERVER, certificate=fixed[0], key=fixed[1], token=source)
    assert access.compose_kubeconfig("lab", given)["users"][0]["user"] == user


# --- the official client --------------------------------------------------------------------------------------------


def test_the_official_client_does_not_retry_and_keeps_connections() -> None:
    settings = Access(SERVER, ca=b"CA", server_name="api").configuration()
    assert (settings.host, settings.retries, settings.verify_ssl, settings.tls_server_name) == (
        SERVER,
        False,
        True,
        "api",
    )
    assert (settings.connection_pool_maxsize, settings.keep_alive) == (64, True)
    assert Path(settings.ssl_ca_cert).read_bytes() == b"CA"
    assert (settings.api_key, settings.cert_file) == ({}, None)


@pytest.mark.parametrize(("server", "ca"), [("http://c", b"CA"), ("http://c", None)])
def test_without_tls_no_authority_is_trusted(server: str, ca: bytes | None) -> None:
    assert not Access(server, ca=ca).configuration().ssl_ca_cert


def test_without_an_own_authority_those_of_the_system_are_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default for REST; websockets would trust those of another package."""
    (tmp_path / "second").touch()
    (tmp_path / "third").touch()
    monkeypatch.setattr(ssl, "get_default_verify_paths", lambda: SimpleNamespace(cafile=None))
    monkeypatch.setattr(module, "SYSTEM_BUNDLES", [str(tmp_path / name) for name in ("first", "second", "third")])
    assert Access(SERVER).configuration().ssl_ca_cert == str(tmp_path / "second")
    monkeypatch.setattr(ssl, "get_default_verify_paths", lambda: SimpleNamespace(cafile=str(tmp_path / "third")))
    assert Access(SERVER).configuration().ssl_ca_cert == str(tmp_path / "third")


def test_the_current_credential_is_written_into_the_settings_before_each_request() -> None:
    given = iter(
        [
            Credential(token="first"),
            Credential(certificate=b"C2", key=b"K2"),
            Credential(token="third", certificate=b"C2", key=b"K2"),
            Credential(token="fourth"),
        ]
    )
    current: list[Credential] = []
    source: Any = SimpleNamespace(credential=lambda: current[-1])
    current.append(next(given))
    settings = Access(SERVER, token=source, certificate=b"C1", key=b"K1").configuration()
    assert settings.api_key == {"BearerToken": "Bearer first"}
    assert Path(settings.cert_file).read_bytes() == b"C1\nK1"
    fixed = settings.cert_file
    current.append(next(given))
    assert settings.get_api_key_with_prefix("BearerToken") is None
    renewed = settings.cert_file
    assert Path(renewed).read_bytes() == b"C2\nK2"
    current.append(next(given))
    assert settings.get_api_key_with_prefix("BearerToken") == "Bearer third"
    assert settings.cert_file == renewed  # connections with it may go on
    current.append(next(given))
    settings.get_api_key_with_prefix("BearerToken")
    assert settings.cert_file == fixed


@pytest.mark.parametrize(
    ("proxy", "headers"),
    [
        ("http://proxy:3128", None),
        ("https://proxy", None),
        ("http://me:secret@proxy:3128", {"proxy-authorization": f"Basic {base64_of(b'me:secret')}"}),
        ("http://me@proxy:3128", {"proxy-authorization": f"Basic {base64_of(b'me:')}"}),
    ],
)
def test_a_proxy_of_a_kubeconfig_gets_its_login(proxy: str, headers: dict[str, str] | None) -> None:
    settings = Access(SERVER, proxy=proxy).configuration()
    assert (settings.proxy, settings.no_proxy, settings.proxy_headers) == (proxy, "", headers)


def test_a_proxy_of_another_kind_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        Access(SERVER, proxy="socks5://me:secret@proxy:1080").configuration()
    assert caught.value.message == 'The proxy of the cluster, "proxy:1080", is not an http or https URL.'
    assert caught.value.hint == "SOCKS proxies are not supported."


def test_a_client_retries_for_as_long_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    monkeypatch.setattr(Access, "_check_certificates", lambda self: checked.append(self.server))
    assert [Access("http://c").client(seconds)._retry_seconds for seconds in (7.0, 0.0, None)] == [7.0, 0.0, 15.0]
    assert checked == []  # without TLS there are none
    Access(SERVER).client()
    assert checked == [SERVER]


def test_an_access_shows_no_secret() -> None:
    shown = repr(
        Access(SERVER, ca=b"SECRET", certificate=b"SECRET", key=b"SECRET", token=Token(lambda: ("SECRET", None)))
    )
    assert "SECRET" not in shown
    assert shown == f"Access(server='{SERVER}', namespace='default', server_name=None, verify=True, proxy=None)"


# --- contexts -------------------------------------------------------------------------------------------------------


def write_config(path: Path, name: str, current: str | None) -> Path:
    document = {
        "current-context": current,
        "clusters": [{"name": name, "cluster": {"server": f"https://{name}"}}],
        "contexts": [{"name": name, "context": {"cluster": name}}],
    }
    path.write_text(json.dumps(document))
    return path


def test_the_current_context_is_that_of_the_first_file_that_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [write_config(tmp_path / name, name, current) for name, current in (("a", None), ("b", "b"), ("c", "c"))]
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", ":".join(map(str, files)))
    assert kubeconfig.current_context() == "b"
    assert kubeconfig.current_context(files[0]) is None
    assert Access.from_kubeconfig().server == "https://b"
    assert Access.from_kubeconfig(context="a").server == "https://a"
    assert Access.from_kubeconfig(context="a").token is None


def test_the_file_of_the_home_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", "")
    assert kubeconfig._files(None) == [tmp_path / ".kube/config"]
    assert kubeconfig._files("~/other") == [tmp_path / "other"]
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path}/x::{tmp_path}/y")
    assert kubeconfig._files(None) == [tmp_path / "x"]  # none exists: the first is named in the error
    (tmp_path / "y").touch()
    assert kubeconfig._files(None) == [tmp_path / "y"]


@pytest.mark.parametrize(
    ("path", "in_pod", "exists", "used"),
    [(None, True, False, True), (None, True, True, False), (None, False, False, False), ("x", True, False, False)],
)
def test_only_a_pod_without_a_kubeconfig_uses_its_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str | None, in_pod: bool, exists: bool, used: bool
) -> None:
    monkeypatch.setattr(kubeconfig, "is_in_pod", lambda: in_pod)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    if exists:
        (tmp_path / "config").touch()
    assert kubeconfig.uses_service_account(path) is used


def test_a_context_that_is_named_is_used_in_a_pod_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubeconfig, "uses_service_account", lambda path: True)
    monkeypatch.setenv("KUBECONFIG", str(write_config(tmp_path / "config", "a", None)))
    assert Access.from_kubeconfig(context="a").server == "https://a"


def test_context_cluster_and_user_have_names_of_their_own(tmp_path: Path) -> None:
    document = {
        "current-context": "ctx",
        "clusters": [{"name": "lab", "cluster": {"server": SERVER, "insecure-skip-tls-verify": True}}],
        "users": [{"name": "me", "user": PAIR}, {"name": "ctx", "user": {"token": "of another user"}}],
        "contexts": [{"name": "ctx", "context": {"cluster": "lab", "user": "me", "namespace": "team-a"}}],
    }
    (tmp_path / "config").write_text(json.dumps(document))
    access = Access.from_kubeconfig(tmp_path / "config")
    assert (access.server, access.namespace, access.verify, access.token) == (SERVER, "team-a", False, None)
    assert (access.certificate, access.key) == (b"C", b"K")


def test_a_kubeconfig_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        Access.from_kubeconfig(tmp_path)
    assert caught.value.message == f"The kubeconfig {tmp_path} cannot be read: Is a directory."


def test_a_context_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    path = write_config(tmp_path / "config", "cluster-a", None)
    with pytest.raises(Exception, match='The kubeconfig has no context "cluster-b"') as caught:
        Access.from_kubeconfig(path, "cluster-b")
    error: Any = caught.value
    assert (error.hint, error.details["known"]) == ("kubectl config get-contexts", ["cluster-a"])
    assert "cluster-a" in error.message


@pytest.mark.parametrize(
    ("command", "found"), [("bin/plugin", "{folder}/bin/plugin"), ("/bin/plugin", "/bin/plugin"), ("plugin", "plugin")]
)
def test_a_plugin_with_a_folder_is_relative_to_its_kubeconfig(tmp_path: Path, command: str, found: str) -> None:
    entry = kubeconfig._with_absolute_paths({"exec": {"command": command, "args": ["a"]}, "client-key": "k"}, tmp_path)
    assert entry == {
        "exec": {"command": found.format(folder=tmp_path), "args": ["a"]},
        "client-key": str(tmp_path / "k"),
    }


# --- commands in pods -----------------------------------------------------------------------------------------------


class Connection:
    """A websocket that gives these frames, and notes what is done to it."""

    def __init__(self, *frames: bytes | int | Exception) -> None:
        self.frames = list(frames)
        self.timeouts: list[float] = []
        self.ends = 0

    def settimeout(self, seconds: float) -> None:
        self.timeouts.append(seconds)

    def recv_data(self) -> tuple[int, bytes]:
        frame = self.frames.pop(0)
        if isinstance(frame, Exception):
            raise frame
        return (frame, b"") if isinstance(frame, int) else (websocket.ABNF.OPCODE_BINARY, frame)

    def shutdown(self) -> None:
        self.ends += 1


def run_in_pod(connection: Connection, asked: list[Any] | None = None, **more: Any) -> Executed:
    def open_websocket(*words: Any) -> Connection:
        if asked is not None:
            asked.append(words)
        return connection

    client = SimpleNamespace(open_websocket=open_websocket)
    opened = type("Opened", (), {"__enter__": lambda self: client, "__exit__": lambda *_: None})
    access: Any = SimpleNamespace(client=opened)
    return execute(access, "team-a", "w-0", ["cat", "/a b"], **more)


SUCCESS = b'\x03{"status": "Success"}'


def test_a_command_is_asked_for_word_by_word_in_the_main_container() -> None:
    asked: list[Any] = []
    connection = Connection(b"\x01out", b"", b"\x01", b"\x00in", b"\x01put", b"\x02err", SUCCESS)
    assert run_in_pod(connection, asked) == Executed(0, b"output", "err")
    query = [("container", "main"), ("stdout", "true"), ("stderr", "true"), ("command", "cat"), ("command", "/a b")]
    assert asked == [("/api/v1/namespaces/team-a/pods/w-0/exec", query, ["v4.channel.k8s.io"])]
    assert (connection.timeouts, connection.ends) == ([30.0], 1)


def test_output_goes_to_a_sink_as_it_comes() -> None:
    pieces: list[bytes] = []
    connection = Connection(b"\x01a", b"\x01", b"\x01bc", SUCCESS)
    assert run_in_pod(connection, sink=pieces.append, idle_seconds=7.0) == Executed(0, b"", "")
    assert (pieces, connection.timeouts) == ([b"a", b"bc"], [7.0])


def failure(*causes: object, message: str = "it failed") -> bytes:
    return b"\x03" + json.dumps({"status": "Failure", "message": message, "details": {"causes": causes}}).encode()


@pytest.mark.parametrize(
    ("causes", "code"),
    [
        ([{"reason": "ExitCode", "message": "3"}], 3),
        ([{"reason": "Other", "message": "x"}, {"reason": "ExitCode", "message": "137"}], 137),
    ],
)
def test_the_exit_code_is_among_the_causes(causes: list[object], code: int) -> None:
    assert run_in_pod(Connection(failure(*causes))).code == code


@pytest.mark.parametrize("details", [b'"details": null', b'"details": {}', b'"details": {"causes": []}'])
def test_a_command_that_could_not_be_run_is_told_in_the_servers_words(details: bytes) -> None:
    connection = Connection(b'\x03{"status": "Failure", "message": "no such file", %s}' % details)
    with pytest.raises(ApiError) as caught:
        run_in_pod(connection)
    assert caught.value.message == 'The command could not be run in the pod: "no such file"'
    assert (caught.value.status, caught.value.reason, connection.ends) == (500, "ExecFailed", 1)


@pytest.mark.parametrize(
    "status",
    [b"\x03", b"\x03x", b"\x03[]", failure({"reason": "ExitCode"}), failure({"reason": "ExitCode", "message": "x"})],
)
def test_an_end_that_cannot_be_read_is_no_end(status: bytes) -> None:
    with pytest.raises(ExecBroken, match="The pod's answer is not a status"):
        run_in_pod(Connection(status))


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (websocket.ABNF.OPCODE_CLOSE, "The connection to the pod w-0 was closed before the command had ended."),
        (OSError("reset"), "The connection to the pod w-0 broke: reset"),
        (websocket.WebSocketTimeoutException("timed out"), "The connection to the pod w-0 broke: timed out"),
    ],
)
def test_a_connection_that_breaks_leaves_the_end_unknown(frame: int | Exception, words: str) -> None:
    connection = Connection(b"\x01part of it", frame)
    with pytest.raises(ExecBroken) as caught:
        run_in_pod(connection)
    assert (caught.value.message, connection.ends) == (words, 1)


# --- calls without a limit of their own -----------------------------------------------------------------------------


def test_a_call_that_ends_in_time_gives_its_result_or_its_error() -> None:
    discarded: list[int] = []
    assert call_with_deadline(lambda: 7, 30.0, discard=discarded.append) == 7
    with pytest.raises(ZeroDivisionError):
        call_with_deadline(lambda: 1 // 0, 30.0)
    assert discarded == []


def test_a_timeout_of_the_call_itself_is_passed_on_in_its_own_words() -> None:
    def end() -> None:
        raise TimeoutError("of the call")

    with pytest.raises(TimeoutError, match=r"^of the call$"):
        call_with_deadline(end, 30.0)
