"""Which login of a kubeconfig is used, what credential plugins are run with, and what each failure says."""

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kubernetes.config
import pytest

from mlbench_cli.errors import CredentialError, UsageError
from mlbench_cli.kube import logins
from mlbench_cli.kube.credentials import Credential, CredentialSource, Token
from mlbench_cli.kube.logins import find_credentials, is_in_pod, load_service_account, run_plugin

OIDC = {"name": "oidc", "config": {"idp-issuer-url": "https://i"}}


@pytest.fixture
def at_1000(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is 1000 s after 1970."""
    monkeypatch.setattr("mlbench_cli.kube.logins.time", SimpleNamespace(time=lambda: 1000.0))


# --- which login ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left_out", "used"),
    [
        ([], "plugin for https://c"),
        (["exec"], "of the file"),
        (["exec", "tokenFile"], "of the entry"),
        (["exec", "tokenFile", "token"], "by openid of one, two for ctx"),
    ],
)
def test_the_first_login_that_kubectl_would_use_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_out: list[str], used: str
) -> None:
    """As client-go: a plugin, then a token's file, then a token."""
    (tmp_path / "token").write_text("of the file")

    def run(plugin: object, cluster: Mapping[str, Any]) -> Credential:
        return Credential(token=f"{plugin} for {cluster['server']}")

    def load(context: str, files: list[Path]) -> Credential:
        return Credential(token=f"by openid of {', '.join(map(str, files))} for {context}")

    monkeypatch.setattr(logins, "run_plugin", run)
    monkeypatch.setattr(logins, "_load_openid_token", load)
    user = {"exec": "plugin", "tokenFile": str(tmp_path / "token"), "token": "of the entry", "auth-provider": OIDC}
    kept = {key: value for key, value in user.items() if key not in left_out}
    source = find_credentials("ctx", {"server": "https://c"}, kept, [Path("one"), Path("two")])
    assert source is not None
    assert source() == used


@pytest.mark.parametrize("user", [{}, {"client-certificate-data": "eA=="}, {"token": "", "exec": None, "username": ""}])
def test_a_user_without_a_login_has_no_source(user: dict[str, object]) -> None:
    assert find_credentials("ctx", {}, user, []) is None


@pytest.mark.parametrize(
    ("user", "method"),
    [
        ({"username": "u", "password": "p"}, "username"),
        ({"auth-provider": {"name": "gcp"}}, "auth-provider"),
        ({"auth-provider": "oidc"}, "auth-provider"),
        ({"username": "u", "auth-provider": {"name": "azure"}}, "username"),
    ],
)
def test_a_login_that_kubernetes_has_removed_is_named(user: dict[str, object], method: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_credentials("ctx", {}, user, [])
    assert caught.value.message == (
        f'The context "ctx" uses the login method "{method}", which Kubernetes no longer supports.'
    )
    assert caught.value.hint == "Write the kubeconfig again with your cloud's tool."


def test_a_token_that_yaml_reads_as_a_number_is_text() -> None:
    source = find_credentials("ctx", {}, {"token": 12345}, [])
    assert source is not None
    assert source.credential() == Credential(token="12345")
    assert (source(), source.credential().expires) == ("12345", None)


# --- files of tokens ------------------------------------------------------------------------------------------------


def test_a_token_file_is_read_again_within_a_minute(tmp_path: Path, at_1000: None) -> None:
    """As client-go does, since kubelets rotate these files."""
    path = tmp_path / "token"
    path.write_bytes(b"  abc.def\n\n")
    found = logins._read_token(path)
    assert (found.token, found.certificate, found.key) == ("abc.def", None, None)
    assert found.expires is not None
    assert 0.75 * (found.expires - 1000.0) == 60.0


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "cannot be read: No such file or directory."), (b"", "is empty."), (b" \n", "is empty.")],
)
def test_a_token_file_that_gives_none_is_named(tmp_path: Path, content: bytes | None, problem: str) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CredentialError) as caught:
        logins._read_token(path)
    assert caught.value.message == f"The token file {path} {problem}"


# --- service accounts -----------------------------------------------------------------------------------------------


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a pod's service account, and the variables that a kubelet sets."""
    for name, text in (("token", "of the pod\n"), ("ca.crt", "CA"), ("namespace", "team-a\n")):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(logins, "SERVICE_ACCOUNT", tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    return tmp_path


def test_a_pod_has_the_variables_and_a_token(account: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_in_pod()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "")
    assert not is_in_pod()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    (account / "token").unlink()
    assert not is_in_pod()


def test_the_account_of_a_pod_has_server_namespace_and_a_token_that_is_read_again(account: Path) -> None:
    configuration, namespace, source = load_service_account()
    assert (configuration.host, configuration.ssl_ca_cert, namespace) == (
        "https://10.0.0.1:6443",
        str(account / "ca.crt"),
        "team-a",
    )
    assert source() == "of the pod"
    (account / "token").write_text("rotated")
    source.discard("of the pod")
    assert source() == "rotated"


@pytest.mark.parametrize("missing", ["ca.crt", "namespace", "token"])
def test_an_account_that_lacks_a_file_cannot_be_used(account: Path, missing: str) -> None:
    (account / missing).unlink()
    with pytest.raises(CredentialError, match=r"^The service account of this pod cannot be used: ") as caught:
        load_service_account()
    assert caught.value.hint == "Set KUBECONFIG to use another one."


# --- OpenID Connect -------------------------------------------------------------------------------------------------


def open_id(monkeypatch: pytest.MonkeyPatch, given: str | Exception | None) -> list[Any]:
    """Have the official client load this header, or fail; returns what it is asked for."""
    asked: list[Any] = []

    def load(files: str, context: str, configuration: Any, temp_file_path: str) -> None:
        asked.append((files, context, Path(temp_file_path).stat().st_mode & 0o777))
        if isinstance(given, Exception):
            raise given
        configuration.api_key = {"BearerToken": given}

    monkeypatch.setattr(kubernetes.config, "load_kube_config", load)
    return asked


def test_a_token_of_openid_connect_is_asked_for_every_four_minutes(
    monkeypatch: pytest.MonkeyPatch, at_1000: None
) -> None:
    """The official client renews it in its last five."""
    asked = open_id(monkeypatch, "Bearer abc")
    found = logins._load_openid_token("ctx", [Path("/one"), Path("/two")])
    assert found.token == "abc"
    assert found.expires is not None
    assert 0.75 * (found.expires - 1000.0) == 240.0
    assert asked == [("/one:/two", "ctx", 0o700)]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (None, "the kubeconfig has no valid id-token"),
        ("Bearer ", "the kubeconfig has no valid id-token"),
        (ValueError("invalid_grant"), "invalid_grant"),
        (KeyError(), "KeyError"),
        (ValueError("x" * 1000), "x" * 500),
        (TimeoutError("whose ever"), "the provider did not answer within 60 s"),
    ],
)
def test_a_login_by_openid_connect_that_fails_says_why(
    monkeypatch: pytest.MonkeyPatch, given: str | Exception | None, reason: str
) -> None:
    open_id(monkeypatch, given)
    with pytest.raises(CredentialError) as caught:
        logins._load_openid_token("ctx", [Path("/one")])
    assert caught.value.message == f'The context "ctx" logs in by OpenID Connect, which failed: {reason}'
    assert caught.value.hint == "Log in again; kubectl --context ctx version   tells whether it worked."


# --- plugins --------------------------------------------------------------------------------------------------------


class Runs:
    """In place of a subprocess: notes how a plugin is run, and what it gives."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[Any] = []
        self.code, self.errors = 0, b""
        self.end: Exception | None = None
        monkeypatch.setattr(shutil, "which", lambda command: None if command == "missing" else f"/bin/{command}")
        monkeypatch.setattr(subprocess, "run", self.run)
        monkeypatch.setenv("OF_THE_USER", "kept")

    def run(self, words: list[str], **more: Any) -> Any:
        self.asked.append((words, more))
        if self.end is not None:
            raise self.end
        return SimpleNamespace(returncode=self.code, stdout=b'{"status": {"token": "t"}}', stderr=self.errors)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(monkeypatch)


def test_a_plugin_is_run_with_its_arguments_and_nothing_to_ask(runs: Runs) -> None:
    entry = {"command": "aws", "args": ["eks", 7], "env": [{"name": "AWS_PROFILE", "value": "lab"}]}
    assert run_plugin(entry, {}).token == "t"
    ((words, more),) = runs.asked
    assert words == ["aws", "eks", "7"]
    assert (more["stdin"], more["timeout"], more["check"], more["capture_output"]) == (
        subprocess.DEVNULL,
        60.0,
        False,
        True,
    )
    environment = more["env"]
    assert (environment["AWS_PROFILE"], environment["OF_THE_USER"]) == ("lab", "kept")
    assert json.loads(environment["KUBERNETES_EXEC_INFO"])["spec"] == {"interactive": False}


@pytest.mark.parametrize("entry", ["aws", ["aws"], {}, {"command": ""}, {"args": []}])
def test_an_entry_without_a_command_is_refused(runs: Runs, entry: object) -> None:
    with pytest.raises(UsageError) as caught:
        run_plugin(entry, {})
    assert caught.value.message == 'The kubeconfig\'s "exec" entry names no command.'
    assert runs.asked == []


@pytest.mark.parametrize(
    ("given", "hint"), [(None, "Install missing."), ("", "Install missing."), (" Get it. \n", "Get it.")]
)
def test_a_plugin_that_is_missing_says_where_to_get_it(runs: Runs, given: str | None, hint: str) -> None:
    with pytest.raises(CredentialError) as caught:
        run_plugin({"command": "missing", "installHint": given}, {})
    assert caught.value.message == (
        'The kubeconfig gets its credentials from the program "missing", which is not installed.'
    )
    assert caught.value.hint == hint


@pytest.mark.parametrize(
    "more", [{"args": 7}, {"env": [{"name": "A"}]}, {"env": ["A=1"]}, {"env": 7}, {"env": [{"value": "1"}]}]
)
def test_an_entry_that_is_malformed_is_refused_before_anything_runs(runs: Runs, more: dict[str, object]) -> None:
    with pytest.raises(UsageError, match='"args" is a list of strings, "env" one of "name" and "value"'):
        run_plugin({"command": "aws", **more}, {})
    assert runs.asked == []


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (subprocess.TimeoutExpired("aws", 60.0), '"aws" gave no credentials within 60 s.'),
        (OSError(13, "Permission denied"), '"aws" cannot be run: Permission denied.'),
    ],
)
def test_a_plugin_that_does_not_end_or_begin_is_named(runs: Runs, end: Exception, message: str) -> None:
    runs.end = end
    with pytest.raises(CredentialError) as caught:
        run_plugin({"command": "aws"}, {})
    assert caught.value.message == message


def test_of_a_plugin_that_complains_at_length_the_end_is_quoted(runs: Runs) -> None:
    runs.code, runs.errors = 255, b"a" * 600 + b"\xff" + b"b" * 400 + b"\n\n"
    with pytest.raises(CredentialError) as caught:
        run_plugin({"command": "aws"}, {})
    words = "a" * 99 + "\ufffd" + "b" * 400
    assert caught.value.message == f'"aws" gave no credentials (exit 255): {words}'


@pytest.mark.parametrize(
    ("cluster", "told"),
    [
        ({"server": "https://c", "insecure-skip-tls-verify": True}, {"insecure-skip-tls-verify": True}),
        ({"server": "https://c", "insecure-skip-tls-verify": False}, {}),
        ({"server": "https://c", "proxy-url": "http://p"}, {"proxy-url": "http://p"}),
        ({"server": "https://c", "extensions": None}, {}),
    ],
)
def test_a_plugin_is_told_what_its_cluster_has(runs: Runs, cluster: dict[str, Any], told: dict[str, Any]) -> None:
    run_plugin({"command": "aws", "provideClusterInfo": True}, cluster)
    spec = json.loads(runs.asked[0][1]["env"]["KUBERNETES_EXEC_INFO"])["spec"]
    assert spec == {"interactive": False, "cluster": {"server": "https://c", **told}}


# --- renewal --------------------------------------------------------------------------------------------------------


class Source:
    """Fetches a numbered credential that lasts for `seconds`, at a time that the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float | None) -> None:
        self.now, self.count = 1000.0, 0
        self.seconds = seconds
        monkeypatch.setattr("mlbench_cli.kube.credentials.time", SimpleNamespace(time=lambda: self.now))
        self.source = CredentialSource(self.fetch)

    def fetch(self) -> Credential:
        self.count += 1
        self.now += 1.0  # it takes a moment
        return Credential(token=f"t{self.count}", expires=None if self.seconds is None else 1000.0 + self.seconds)


def test_the_life_of_a_credential_counts_from_when_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Source(monkeypatch, 100.0)
    assert found.source() == "t1"
    found.now = 1074.9
    assert found.source() == "t1"
    found.now = 1075.0
    assert found.source() == "t2"


def test_a_credential_without_an_end_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Source(monkeypatch, None)
    found.source()
    found.now = 1e12
    assert (found.source(), found.count) == ("t1", 1)
    found.source.discard("another")
    found.source.discard("t1")
    assert (found.source(), found.count) == ("t2", 2)


def test_a_credential_that_has_ended_already_is_fetched_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Source(monkeypatch, -100.0)
    assert [found.source(), found.source()] == ["t1", "t2"]


def test_discarding_before_the_first_use_fetches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Source(monkeypatch, None)
    found.source.discard("t1")
    assert found.count == 0


@pytest.mark.parametrize(
    ("certificate", "key", "pem"), [(None, None, None), (b"C", b"K", b"C\nK"), (b"C", None, b"C\n"), (None, b"K", None)]
)
def test_a_certificate_and_its_key_are_one_file(
    certificate: bytes | None, key: bytes | None, pem: bytes | None
) -> None:
    assert Credential(certificate=certificate, key=key).pem == pem


def test_a_token_source_gives_tokens_with_their_end() -> None:
    assert Token(lambda: ("secret", 5.0)).credential() == Credential(token="secret", expires=5.0)


def test_credentials_show_no_secret() -> None:
    found = repr(Credential(token="SECRET", certificate=b"SECRET", key=b"SECRET", expires=5.0))
    assert found == "Credential(expires=5.0)"
