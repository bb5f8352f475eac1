"""Read kubeconfigs like kubectl: merge files and find the context here, then load it with the official client.

Files are merged here because kubectl uses the first file's current context but the official client the last one's, and
to report errors with file, entry and next command.
"""

import base64
import binascii
import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mlbench_cli.errors import NotFoundError, UsageError, did_you_mean
from mlbench_cli.kube.credentials import CredentialSource, private_folder
from mlbench_cli.kube.logins import find_credentials, is_in_pod, load_service_account
from mlbench_cli.kube.official import official
from mlbench_cli.util.files import read_regular
from mlbench_cli.util.yaml_text import read_yaml

SECTIONS = {"clusters": "cluster", "users": "user", "contexts": "context"}
# Keys that client-go reads. Others in "users" and "clusters" may change who one is or whom one trusts: refused.
KNOWN_KEYS = {
    "users": (
        *("client-certificate", "client-certificate-data", "client-key", "client-key-data", "token", "tokenFile"),
        *("as", "as-uid", "as-groups", "as-user-extra", "username", "password", "auth-provider", "exec", "extensions"),
    ),
    "clusters": (
        *("server", "tls-server-name", "insecure-skip-tls-verify", "certificate-authority"),
        *("certificate-authority-data", "proxy-url", "disable-compression", "extensions", "LocationOfOrigin"),
    ),
}
IMPERSONATION = ("as", "as-uid", "as-groups", "as-user-extra")
MAX_BYTES = 1 << 20  # of a kubeconfig; those of people with hundreds of clusters have some 100 kB
PATHS = ("certificate-authority", "client-certificate", "client-key", "tokenFile")


@dataclass(frozen=True)
class OpenedContext:
    """A context loaded by the official client, without its login: `credentials` is asked when needed."""

    configuration: Any  # a kubernetes.client.Configuration
    namespace: str
    credentials: CredentialSource | None
    impersonation: Mapping[str, Any] = field(default_factory=dict)  # the keys "as", "as-groups" and so on


@dataclass
class _Merged:
    """The entries of all files by section and name. Paths in them are absolute."""

    current: str = ""
    entries: dict[str, dict[str, dict[str, Any]]] = field(default_factory=lambda: {section: {} for section in SECTIONS})

    def find(self, section: str, name: str) -> dict[str, Any]:
        """An entry. Raises NotFoundError."""
        known = self.entries[section]
        if name not in known:
            raise NotFoundError(
                f'The kubeconfig has no {SECTIONS[section]} "{name}".{did_you_mean(name, list(known))}',
                hint="kubectl config get-contexts",
                details={"known": list(known)},
            )
        return known[name]


@contextlib.contextmanager
def open_context(path: str | Path | None = None, context: str | None = None) -> Iterator[OpenedContext]:
    """The named or current context. Its certificates are temporary files until the block ends."""
    if context is None and uses_service_account(path):
        yield OpenedContext(*load_service_account())
        return
    files = _files(path)
    merged = _merge(files)
    name = context or merged.current
    if not name:
        raise UsageError(
            "The kubeconfig has no current context.", hint="kubectl config get-contexts, then --context NAME"
        )
    chosen = merged.find("contexts", name)
    cluster = merged.find("clusters", _text(chosen, "cluster", f'context "{name}"'))
    for key in ("server", "tls-server-name", "proxy-url"):
        if key == "server" or cluster.get(key):
            _text(cluster, key, f'cluster "{chosen["cluster"]}"')
    user = merged.find("users", str(chosen["user"])) if chosen.get("user") else {}
    for key in ("insecure-skip-tls-verify", "disable-compression"):  # "false" is a text, and not false
        if not isinstance(cluster.get(key, False), bool):
            raise UsageError(
                f'"{key}" of the kubeconfig {_listed(files)} is {cluster[key]!r}, neither true nor false.',
                hint=f"Write it without quotes:   {key}: false",
            )
    for section, entry in (("clusters", cluster), ("users", user)):
        _check_keys(section, entry, files)
        _check_base64(entry, files)
    acting_as = {key: user[key] for key in IMPERSONATION if user.get(key)}
    impersonation_headers(acting_as)
    with private_folder() as folder:
        configuration = _load(name, chosen, cluster, user, folder)
        credentials = find_credentials(name, cluster, user, files)
        yield OpenedContext(configuration, str(chosen.get("namespace") or "default"), credentials, acting_as)


def current_context(path: str | Path | None = None) -> str | None:
    """The name of the current context; None if there is none."""
    return None if uses_service_account(path) else _merge(_files(path)).current or None


def uses_service_account(path: str | Path | None) -> bool:
    """Whether this is a pod without a kubeconfig, which uses its service account."""
    return path is None and is_in_pod() and not _files(None)[0].exists()


def _load(
    name: str, context: Mapping[str, Any], cluster: Mapping[str, Any], user: Mapping[str, Any], folder: str
) -> Any:
    """The official client's configuration for one context, with only fixed client certificates of the user."""
    kubernetes = official().kubernetes
    document = {
        "current-context": name,
        "contexts": [{"name": name, "context": {**context, "user": name}}],
        "clusters": [{"name": context["cluster"], "cluster": cluster}],
        "users": [{"name": name, "user": {key: user[key] for key in user if key.startswith("client-")}}],
    }
    configuration = kubernetes.client.Configuration(proxy="")  # the environment is read again for each client
    try:
        kubernetes.config.load_kube_config_from_dict(
            document, client_configuration=configuration, persist_config=False, temp_file_path=folder
        )
    except (kubernetes.config.ConfigException, OSError, TypeError, AttributeError) as error:
        raise UsageError(
            f'The context "{name}" of the kubeconfig cannot be used: {error}.', hint=f"kubectl --context {name} version"
        ) from None
    return configuration


def _files(path: str | Path | None) -> list[Path]:
    if path is not None:
        return [Path(os.path.expanduser(path))]
    listed = [Path(part) for part in os.environ.get("KUBECONFIG", "").split(os.pathsep) if part]
    return [file for file in listed if file.exists()] or listed[:1] or [Path(os.path.expanduser("~/.kube/config"))]


def _merge(files: list[Path]) -> _Merged:
    """As with kubectl, the first file with an entry or a current context wins."""
    merged = _Merged()
    for file in files:
        document = _read_yaml(file)
        merged.current = merged.current or str(document.get("current-context") or "")
        for section, kind in SECTIONS.items():
            items = document.get(section) or []
            if not isinstance(items, list):
                raise UsageError(f'{file}: "{section}" is not a list.')
            for item in items:
                if not isinstance(item, dict) or not isinstance(item.get(kind) or {}, dict) or "name" not in item:
                    raise UsageError(f'{file}: an entry of "{section}" is not a mapping with "name" and "{kind}".')
                entry = _with_absolute_paths(item.get(kind) or {}, file.absolute().parent)
                merged.entries[section].setdefault(str(item["name"]), entry)
    return merged


def _with_absolute_paths(entry: Mapping[str, Any], folder: Path) -> dict[str, object]:
    absolute = {**entry, **{key: str(folder / str(entry[key])) for key in PATHS if entry.get(key)}}
    plugin = entry.get("exec")
    if isinstance(plugin, dict) and os.sep in str(plugin.get("command") or ""):
        absolute["exec"] = {**plugin, "command": str(folder / str(plugin["command"]))}
    return absolute


def _read_yaml(file: Path) -> dict[str, object]:
    try:
        document = read_yaml(read_regular(file, MAX_BYTES), f"The kubeconfig {file}", repeated_keys=True)
    except FileNotFoundError:
        raise NotFoundError(
            f"There is no kubeconfig {file}.", hint="Set KUBECONFIG, or name the file with --kubeconfig."
        ) from None
    except OSError as error:
        raise UsageError(f"The kubeconfig {file} cannot be read: {error.strerror}.") from None
    if not isinstance(document or {}, dict):
        raise UsageError(f"The kubeconfig {file} is not a mapping.")
    return document or {}


def _text(entry: Mapping[str, Any], key: str, place: str) -> str:
    value = entry.get(key)
    if not value:
        raise UsageError(f'The kubeconfig\'s {place} has no "{key}".')
    if not isinstance(value, str):
        raise UsageError(f'"{key}" of the kubeconfig\'s {place} is not text.')
    return value


def _check_base64(entry: Mapping[str, Any], files: list[Path]) -> None:
    """Reject invalid base64, which the official client ignores silently. As in Go, line ends do not count."""
    for key in (key for key in entry if key.endswith("-data") and entry[key]):
        try:
            base64.b64decode("".join(str(entry[key]).splitlines()), validate=True)
        except (binascii.Error, ValueError):
            raise UsageError(f'"{key}" of the kubeconfig {_listed(files)} is not base64.') from None


def _check_keys(section: str, entry: Mapping[str, Any], files: list[Path]) -> None:
    for key in entry:
        if key not in KNOWN_KEYS[section]:
            near = did_you_mean(str(key), KNOWN_KEYS[section])
            raise UsageError(
                f'The kubeconfig {_listed(files)} has the key "{key}" in "{section}", unknown to mlbench.{near}',
                hint="Remove it: mlbench cannot tell whether it changes who you are, or which server is trusted.",
            )


def impersonation_headers(user: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """The headers by which an administrator acts as somebody else, as kubectl sends them. Raises UsageError."""
    groups, extra = user.get("as-groups") or [], user.get("as-user-extra") or {}
    if not isinstance(groups, list) or not isinstance(extra, dict):
        raise UsageError('"as-groups" of a kubeconfig is a list, "as-user-extra" a mapping of lists.')
    headers = [("Impersonate-User", user["as"])] if user.get("as") else []
    headers += [("Impersonate-Uid", user["as-uid"])] if user.get("as-uid") else []
    headers += [("Impersonate-Group", group) for group in groups]
    for key, values in extra.items():
        name = "Impersonate-Extra-" + quote(str(key).lower(), safe="!#$&'*+-.^_`|~")
        headers += [(name, value) for value in (values if isinstance(values, list) else [values])]
    if headers and not user.get("as"):
        raise UsageError('The kubeconfig names groups, a uid or extra fields to act as, but no user: "as" is missing.')
    if any(not isinstance(value, str) or "\n" in value or "\r" in value for _, value in headers):
        raise UsageError('"as", "as-uid", "as-groups" and "as-user-extra" of a kubeconfig are texts of one line.')
    return tuple(headers)


def _listed(files: list[Path]) -> str:
    return ", ".join(map(str, files))
