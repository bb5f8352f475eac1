"""Reads a kubeconfig as kubectl does, and composes one for other programs; writes none.

What is wrong with one is told with file, entry and next command.
"""

import base64
import binascii
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from mlbench_cli.errors import CredentialError, NotFoundError, UsageError, did_you_mean
from mlbench_cli.kube.access import Access, Token

PLUGIN_SECONDS = 60.0
SECTIONS = {"clusters": "cluster", "users": "user", "contexts": "context"}


def read(path: str | Path | None = None, context: str | None = None, namespace: str | None = None) -> Access:
    """The access to `context` (the current one unless told otherwise)."""
    config = _merge(_files(path))
    name = context or config["current-context"]
    if not name:
        raise UsageError(
            "The kubeconfig has no current context.", hint="kubectl config get-contexts, then --context NAME"
        )
    chosen = _entry(config, "contexts", name)
    cluster = _entry(config, "clusters", _text(chosen, "cluster", f'context "{name}"'))
    user = _entry(config, "users", str(chosen["user"])) if chosen.get("user") else {}
    certificate, key = _data(user, "client-certificate"), _data(user, "client-key")
    return Access(
        server=_text(cluster, "server", f'cluster "{chosen["cluster"]}"').rstrip("/"),
        namespace=namespace or str(chosen.get("namespace") or "default"),
        ca=_data(cluster, "certificate-authority"),
        token=_token(user, cluster, name),
        certificate=certificate,
        key=key,
        server_name=cluster.get("tls-server-name"),
        verify=not cluster.get("insecure-skip-tls-verify", False),
        proxy=cluster.get("proxy-url"),
    )


def contexts(path: str | Path | None = None) -> list[str]:
    """The names of the contexts, in the order of the files."""
    return list(_merge(_files(path))["contexts"])


def current_context(path: str | Path | None = None) -> str | None:
    """The name of the current context, None where there is none."""
    return _merge(_files(path))["current-context"] or None


def composed(name: str, access: Access, user: Mapping[str, Any]) -> dict[str, Any]:
    """A kubeconfig for `access` alone. `user` holds its token, or what gives one; a client certificate goes first."""
    server: dict[str, Any] = {"server": access.server}
    if access.ca:
        server["certificate-authority-data"] = base64.b64encode(access.ca).decode()
    if access.server_name:
        server["tls-server-name"] = access.server_name
    if not access.verify:
        server["insecure-skip-tls-verify"] = True
    if access.proxy:
        server["proxy-url"] = access.proxy
    if access.certificate and access.key:
        user = {
            "client-certificate-data": base64.b64encode(access.certificate).decode(),
            "client-key-data": base64.b64encode(access.key).decode(),
        }
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": name,
        "clusters": [{"name": name, "cluster": server}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name, "namespace": access.namespace}}],
        "users": [{"name": name, "user": dict(user)}],
    }


def _files(path: str | Path | None) -> list[Path]:
    if path is not None:
        return [Path(path).expanduser()]
    listed = [Path(part) for part in os.environ.get("KUBECONFIG", "").split(os.pathsep) if part]
    return [file for file in listed if file.exists()] or listed[:1] or [Path.home() / ".kube" / "config"]


def _merge(files: list[Path]) -> dict[str, Any]:
    """Entries by section and name; the first file that names one wins, as with kubectl."""
    merged: dict[str, Any] = {"current-context": "", **{section: {} for section in SECTIONS}}
    for file in files:
        document = _load(file)
        merged["current-context"] = merged["current-context"] or str(document.get("current-context") or "")
        for section, kind in SECTIONS.items():
            items = document.get(section) or []
            if not isinstance(items, list):
                raise UsageError(f'{file}: "{section}" is not a list.')
            for item in items:
                if not isinstance(item, dict) or not isinstance(item.get(kind) or {}, dict) or "name" not in item:
                    raise UsageError(f'{file}: an entry of "{section}" is not a mapping with "name" and "{kind}".')
                merged[section].setdefault(str(item["name"]), {**(item.get(kind) or {}), "_folder": file.parent})
    return merged


def _load(file: Path) -> dict[str, Any]:
    import yaml

    try:
        document = yaml.safe_load(file.read_text("utf-8"))
    except FileNotFoundError:
        raise NotFoundError(
            f"There is no kubeconfig {file}.", hint="Set KUBECONFIG, or name the file with --kubeconfig."
        ) from None
    except OSError as error:
        raise UsageError(f"The kubeconfig {file} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"The kubeconfig {file} is not valid YAML: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(document or {}, dict):
        raise UsageError(f"The kubeconfig {file} is not a mapping.")
    return document or {}


def _entry(config: Mapping[str, Any], section: str, name: str) -> dict[str, Any]:
    known = config[section]
    if name not in known:
        raise NotFoundError(
            f'The kubeconfig has no {SECTIONS[section]} "{name}".{did_you_mean(name, list(known))}',
            hint="kubectl config get-contexts",
            details={"known": list(known)},
        )
    entry: dict[str, Any] = known[name]
    return entry


def _text(entry: Mapping[str, Any], key: str, where: str) -> str:
    value = entry.get(key)
    if not isinstance(value, str) or not value:
        raise UsageError(f'The kubeconfig\'s {where} has no "{key}".')
    return value


def _data(entry: Mapping[str, Any], key: str) -> bytes | None:
    """The bytes given inline in base64 as KEY-data, or in the file KEY (relative to the kubeconfig)."""
    if inline := entry.get(f"{key}-data"):
        try:
            return base64.b64decode(str(inline), validate=True)
        except (binascii.Error, ValueError):
            raise UsageError(f'"{key}-data" of the kubeconfig is not base64.') from None
    if not entry.get(key):
        return None
    return _read_file(entry, key)


def _read_file(entry: Mapping[str, Any], key: str) -> bytes:
    file = Path(entry["_folder"]) / str(entry[key])
    try:
        return file.read_bytes()
    except OSError as error:
        raise UsageError(f'{file}, named as "{key}" in the kubeconfig, cannot be read: {error.strerror}.') from None


def _token(user: Mapping[str, Any], cluster: Mapping[str, Any], context: str) -> Token | None:
    if user.get("exec"):
        return Token(lambda: _run_plugin(user, cluster))
    if user.get("tokenFile"):
        # Rotated on disk by whoever mounts it: read again at least every minute, as client-go does.
        return Token(lambda: (_read_file(user, "tokenFile").decode("ascii", "replace").strip(), _in_seconds(80)))
    if user.get("token"):
        token = str(user["token"])
        return Token(lambda: (token, None))
    for key in ("username", "auth-provider"):
        if user.get(key):
            raise UsageError(
                f'The context "{context}" logs in by "{key}", which Kubernetes no longer knows.',
                hint="Write the kubeconfig anew with your cloud's tool.",
            )
    return None


def _in_seconds(seconds: float) -> float:
    import time

    return time.time() + seconds


def _run_plugin(user: Mapping[str, Any], cluster: Mapping[str, Any]) -> tuple[str, float | None]:
    """The token that a client-go credential plugin gives, and when it expires."""
    plugin = user["exec"]
    if not isinstance(plugin, dict) or not plugin.get("command"):
        raise UsageError('The kubeconfig\'s "exec" entry names no command.')
    command = str(plugin["command"])
    if os.sep in command:
        command = str(Path(user["_folder"]) / command)
    if shutil.which(command) is None:
        raise CredentialError(
            f'The kubeconfig gets its token from the program "{command}", which is not installed.',
            hint=str(plugin.get("installHint") or "").strip() or f"Install {command}.",
        )
    version = str(plugin.get("apiVersion") or "client.authentication.k8s.io/v1")
    info: dict[str, Any] = {"apiVersion": version, "kind": "ExecCredential", "spec": {"interactive": False}}
    if plugin.get("provideClusterInfo"):
        info["spec"]["cluster"] = {
            key: cluster[key] for key in ("server", "certificate-authority-data", "tls-server-name") if cluster.get(key)
        }
    extra = {str(item["name"]): str(item["value"]) for item in plugin.get("env") or ()}
    try:
        done = subprocess.run(
            [command, *(str(part) for part in plugin.get("args") or ())],
            env={**os.environ, **extra, "KUBERNETES_EXEC_INFO": json.dumps(info)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PLUGIN_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CredentialError(f'"{command}" gave no token within {PLUGIN_SECONDS:.0f} s.') from None
    except OSError as error:
        raise CredentialError(f'"{command}" cannot be run: {error.strerror}.') from None
    if done.returncode:
        words = done.stderr.decode("utf-8", "replace").strip()[-500:]
        raise CredentialError(f'"{command}" gave no token (exit {done.returncode}): {words}')
    return _credential(command, done.stdout)


def _credential(command: str, output: bytes) -> tuple[str, float | None]:
    try:
        status = json.loads(output)["status"]
        token, expires = status.get("token"), status.get("expirationTimestamp")
        moment = datetime.fromisoformat(expires.replace("Z", "+00:00")).timestamp() if expires else None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CredentialError(f'"{command}" answered something else than an ExecCredential with a status.') from None
    if not isinstance(token, str) or not token:
        raise CredentialError(f'"{command}" gave no token; only plugins that give one are supported.')
    return token, moment
