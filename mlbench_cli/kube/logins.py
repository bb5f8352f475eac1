"""The logins of a kubeconfig other than fixed certificates, as credential sources.

The official client handles OpenID Connect and service accounts. Credential plugins are run here, because the official
client waits for them without a timeout and continues unauthenticated after a failure. It also reads token files only
once.
"""

import base64
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from mlbench_cli.errors import CredentialError, UsageError
from mlbench_cli.kube.credentials import Credential, CredentialSource, private_folder
from mlbench_cli.kube.official import call_with_deadline, official
from mlbench_cli.util.files import explain_start, read_regular

PLUGIN_SECONDS = 60.0
PERSON_SECONDS = 600.0  # for a person to open a page and to enter a code
OUTPUT_BYTES = 1 << 20  # of a plugin
TOKEN_BYTES = 1 << 20
OPENID_SECONDS = 60.0
# Token files and service accounts are rotated on disk: read at least every minute, as client-go does.
REREAD_SECONDS = 80.0  # read again after 75 % of it
# The official client renews OpenID Connect tokens in their last five minutes, so ask every four.
OPENID_CHECK_SECONDS = 320.0
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def find_credentials(
    context: str, cluster: Mapping[str, Any], user: Mapping[str, Any], files: Sequence[Path]
) -> CredentialSource | None:
    """The credential source of `user`; None for anonymous users and fixed client certificates. Nothing is run or read
    yet.

    Paths in `cluster` and `user` are absolute; `files` are their kubeconfigs. Raises UsageError for logins that
    Kubernetes has removed.
    """
    provider = user.get("auth-provider")
    if user.get("exec"):
        return CredentialSource(lambda: run_plugin(user["exec"], cluster))
    if user.get("tokenFile"):
        return CredentialSource(lambda: _read_token(Path(str(user["tokenFile"]))))
    if user.get("token"):
        return CredentialSource(lambda: Credential(token=str(user["token"])))
    if isinstance(provider, dict) and provider.get("name") == "oidc":
        return CredentialSource(lambda: _load_openid_token(context, files))
    for key in ("username", "auth-provider"):
        if user.get(key):
            raise UsageError(
                f'The context "{context}" uses the login method "{key}", which Kubernetes no longer supports.',
                hint="Write the kubeconfig again with your cloud's tool.",
            )
    return None


def _read_token(file: Path) -> Credential:
    try:
        token = read_regular(file, TOKEN_BYTES).decode("ascii", "replace").strip()
    except OSError as error:
        raise CredentialError(f"The token file {file} cannot be read: {error.strerror}.") from None
    if not token:
        raise CredentialError(f"The token file {file} is empty.")
    return Credential(token=token, expires=time.time() + REREAD_SECONDS)


def is_in_pod() -> bool:
    """Whether this process runs in a pod with a service account."""
    return bool(os.environ.get("KUBERNETES_SERVICE_HOST")) and (SERVICE_ACCOUNT / "token").is_file()


def load_service_account() -> tuple[Any, str, CredentialSource]:
    """The kubernetes.client.Configuration, namespace and credentials of the pod that this process runs in. Raises
    CredentialError."""
    kubernetes = official().kubernetes
    configuration = kubernetes.client.Configuration(proxy="")
    token, ca, namespace = (SERVICE_ACCOUNT / name for name in ("token", "ca.crt", "namespace"))
    try:
        loader = kubernetes.config.incluster_config.InClusterConfigLoader
        loader(token_filename=str(token), cert_filename=str(ca)).load_and_set(configuration)
        name = namespace.read_text().strip()
    except (kubernetes.config.ConfigException, OSError) as error:
        raise CredentialError(
            f"The service account of this pod cannot be used: {error}", hint="Set KUBECONFIG to use another one."
        ) from None
    return configuration, name, CredentialSource(lambda: _read_token(token))


def _load_openid_token(context: str, files: Sequence[Path]) -> Credential:
    """The official client renews the token and writes it to the kubeconfig, because refresh tokens may be single-
    use."""
    kubernetes = official().kubernetes

    def load() -> str:
        configuration = kubernetes.client.Configuration()
        with private_folder() as folder:
            kubernetes.config.load_kube_config(
                os.pathsep.join(map(str, files)), context, configuration, temp_file_path=folder
            )
        return str(configuration.api_key.get("BearerToken") or "").partition(" ")[2]

    try:
        token = call_with_deadline(load, OPENID_SECONDS)
        reason = "" if token else "the kubeconfig has no valid id-token"
    except TimeoutError:
        reason = f"the provider did not answer within {OPENID_SECONDS:.0f} s"
    except Exception as error:  # of the official client, requests or oauthlib, without a common base class
        reason = str(error) or type(error).__name__
    if reason:
        raise CredentialError(
            f'The context "{context}" logs in by OpenID Connect, which failed: {reason[:500]}',
            hint=f"Log in again; kubectl --context {context} version   tells whether it worked.",
        )
    return Credential(token=token, expires=time.time() + OPENID_CHECK_SECONDS)


def run_plugin(plugin: object, cluster: Mapping[str, Any]) -> Credential:
    """Run a client-go credential plugin; returns a token, or a client certificate with its key.

    Raises CredentialError with the plugin's message, UsageError for an entry without a command.
    """
    if not isinstance(plugin, dict) or not plugin.get("command"):
        raise UsageError('The kubeconfig\'s "exec" entry names no command.')
    command = str(plugin["command"])
    if shutil.which(command) is None:
        raise CredentialError(
            f'The kubeconfig gets its credentials from the program "{command}", which is not installed.',
            hint=str(plugin.get("installHint") or "").strip() or f"Install {command}.",
        )
    try:
        arguments = [str(part) for part in plugin.get("args") or ()]
        extra = {str(item["name"]): str(item["value"]) for item in plugin.get("env") or ()}
        information = json.dumps(_plugin_info(plugin, cluster))
    except (TypeError, KeyError, AttributeError):
        raise UsageError(
            'The kubeconfig\'s "exec" entry is malformed: "args" is a list of strings, "env" one of "name" and "value".'
        ) from None
    interactive = _is_interactive(plugin, command)
    environment = {**os.environ, **extra, "KUBERNETES_EXEC_INFO": information}
    code, output, words = _converse([command, *arguments], environment, interactive)
    if code is None:
        seconds = PERSON_SECONDS if interactive else PLUGIN_SECONDS
        raise CredentialError(f'"{command}" gave no credentials within {seconds:.0f} s. {words}'.rstrip())
    if code:
        raise CredentialError(f'"{command}" gave no credentials (exit {code}): {words.strip() or "it said nothing"}')
    return _parse_credential(command, output)


def _is_interactive(plugin: Mapping[str, Any], command: str) -> bool:
    """Whether the plugin may ask a person: by its `interactiveMode`, if there is a terminal. Raises CredentialError."""
    mode = plugin.get("interactiveMode") or "IfAvailable"
    if mode not in ("Never", "IfAvailable", "Always"):
        raise UsageError(
            f'"interactiveMode" of the kubeconfig\'s "exec" entry is {mode!r:.40}, not Never, IfAvailable or Always.'
        )
    terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()
    if mode == "Always" and not terminal:
        raise CredentialError(
            f'"{command}" wants to ask a person, and there is no terminal.', hint="Log in on a terminal."
        )
    return terminal and mode != "Never"


def _converse(argv: Sequence[str], environment: Mapping[str, str], interactive: bool) -> tuple[int | None, bytes, str]:
    """Run a plugin: exit code (None: out of time), standard output, and the end of what it told the person.

    What it tells ("open this page and enter the code") appears at once on a terminal, so that a person can answer.
    """
    try:
        process = subprocess.Popen(
            argv,
            env=environment,
            stdin=None if interactive else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    except OSError as error:
        why = explain_start(argv[0], error, environment.get("PATH", os.defpath))
        raise CredentialError(f'"{argv[0]}" cannot be run: {why}.') from None
    output, told = bytearray(), bytearray()

    def read(stream: IO[bytes], into: bytearray, show: bool) -> None:
        while chunk := os.read(stream.fileno(), 1 << 16):
            into += chunk[: OUTPUT_BYTES - len(into)]
            if show:
                sys.stderr.write(chunk.decode("utf-8", "replace"))
                sys.stderr.flush()

    assert process.stdout is not None
    assert process.stderr is not None
    shows = sys.stderr is not None and sys.stderr.isatty()
    readers = [
        threading.Thread(target=read, args=(process.stdout, output, False), daemon=True),
        threading.Thread(target=read, args=(process.stderr, told, shows), daemon=True),
    ]
    for reader in readers:
        reader.start()
    code: int | None
    try:
        code = process.wait(PERSON_SECONDS if interactive else PLUGIN_SECONDS)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    for reader in readers:
        reader.join(1)  # a child of the plugin may keep the pipes open
    return code, bytes(output), told.decode("utf-8", "replace").strip()[-500:]


def _plugin_info(plugin: Mapping[str, Any], cluster: Mapping[str, Any]) -> dict[str, Any]:
    version = str(plugin.get("apiVersion") or "client.authentication.k8s.io/v1")
    spec: dict[str, Any] = {"interactive": _is_interactive(plugin, str(plugin.get("command")))}
    if plugin.get("provideClusterInfo"):
        keys = ("server", "certificate-authority-data", "tls-server-name", "insecure-skip-tls-verify", "proxy-url")
        spec["cluster"] = {key: cluster[key] for key in keys if cluster.get(key)}
        if not cluster.get("certificate-authority-data") and cluster.get("certificate-authority"):
            content = Path(str(cluster["certificate-authority"])).read_bytes()
            spec["cluster"]["certificate-authority-data"] = base64.b64encode(content).decode()
        for item in cluster.get("extensions") or ():
            if item.get("name") == "client.authentication.k8s.io/exec":
                spec["cluster"]["config"] = item.get("extension")
    return {"apiVersion": version, "kind": "ExecCredential", "spec": spec}


def _parse_credential(command: str, output: bytes) -> Credential:
    try:
        status = json.loads(output)["status"]
        token, certificate, key = (status.get(name) for name in ("token", "clientCertificateData", "clientKeyData"))
        expires = status.get("expirationTimestamp")
        moment = datetime.fromisoformat(expires.replace("Z", "+00:00")).timestamp() if expires else None
        found = Credential(
            token=token or None,
            certificate=certificate.encode() if certificate and key else None,
            key=key.encode() if certificate and key else None,
            expires=moment,
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CredentialError(f'"{command}" did not answer with an ExecCredential that has a status.') from None
    if not (isinstance(token, str) and token) and found.certificate is None:
        raise CredentialError(f'"{command}" gave no token, and no client certificate with its key.')
    return found
