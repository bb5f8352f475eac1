"""Questions to a registry and their answers, from Docker's settings to the token of a repository."""

import base64
import io
import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.tasks.images import parse_image
from mlbench_cli.tasks.registries import FoundImage, Login, Presence, docker_folder, find_docker_login, find_image

DIGEST = "sha256:" + "ab" * 32
INDEX = {
    "manifests": [
        {"platform": {"os": "linux", "architecture": "amd64"}},
        {"platform": {"os": "linux", "architecture": "arm64", "variant": "v8"}},
        {"platform": {"os": "linux", "architecture": "arm64", "variant": "v9"}},
        {"platform": {"os": "unknown", "architecture": "unknown"}},
        {},
    ]
}
BASIC = {"Authorization": "Basic bWU6c2VjcmV0"}  # base64 of me:secret
ME = Login("me", "secret")


class Answer(io.BytesIO):
    """What urlopen returns."""

    def __init__(self, body: Any = b"", status: int = 200, **headers: str) -> None:
        super().__init__(body if isinstance(body, bytes) else json.dumps(body).encode())
        self.status = status
        self.headers = Message()
        for key, value in headers.items():
            self.headers[key.replace("_", "-")] = value


class Registry:
    """Answers by URL; the first of several answers that are left is given. Requests are kept with their login."""

    def __init__(self) -> None:
        self.answers: dict[str, list[Answer | Exception]] = {}
        self.asked: list[tuple[str, str | None]] = []
        self.accept = ""

    def open(self, request: urllib.request.Request, timeout: float) -> Answer:
        assert timeout > 0
        url = request.full_url
        self.asked.append((url, request.unredirected_hdrs.get("Authorization") or request.get_header("Authorization")))
        self.accept = request.get_header("Accept") or self.accept
        answer = self.answers[url].pop(0)
        if isinstance(answer, Exception):
            raise answer
        if answer.status >= 300:
            raise urllib.error.HTTPError(url, answer.status, "", answer.headers, answer)
        return answer


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Registry:
    found = Registry()
    monkeypatch.setattr(urllib.request, "urlopen", found.open)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.delenv("MLBENCH_REGISTRY_ENDPOINT", raising=False)
    return found


@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("busybox", "https://registry-1.docker.io/v2/library/busybox/manifests/latest"),
        ("me/task:1.0", "https://registry-1.docker.io/v2/me/task/manifests/1.0"),
        ("ghcr.io/task:1.0", "https://ghcr.io/v2/task/manifests/1.0"),
        (f"ghcr.io/me/task@{DIGEST}", f"https://ghcr.io/v2/me/task/manifests/{DIGEST}"),
        ("localhost:5000/task", "http://localhost:5000/v2/task/manifests/latest"),
        ("localhost/task", "http://localhost/v2/task/manifests/latest"),
        ("127.0.0.1:5000/task", "http://127.0.0.1:5000/v2/task/manifests/latest"),
        ("localhost.example/task", "https://localhost.example/v2/task/manifests/latest"),
    ],
)
def test_the_address_of_a_manifest(registry: Registry, name: str, url: str) -> None:
    registry.answers[url] = [Answer(INDEX, Docker_Content_Digest=DIGEST)]
    assert find_image(parse_image(name)) == FoundImage(
        Presence.PRESENT, DIGEST, platforms=("linux/amd64", "linux/arm64")
    )
    assert registry.asked == [(url, None)]
    assert "application/vnd.oci.image.index.v1+json" in registry.accept.split(", ")


def test_another_endpoint_stands_for_all_registries(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLBENCH_REGISTRY_ENDPOINT", "http://mirror/")
    registry.answers["http://mirror/v2/me/task/manifests/1"] = [Answer({})]
    assert find_image(parse_image("ghcr.io/me/task:1")) == FoundImage(Presence.PRESENT)


URL = "https://r.io/v2/a/manifests/1"


def ask(registry: Registry, *answers: Answer | Exception, login: Login | None = None) -> FoundImage:
    registry.answers[URL] = list(answers)
    return find_image(parse_image("r.io/a:1"), login)


@pytest.mark.parametrize(
    ("status", "body", "found"),
    [
        (404, b"", FoundImage(Presence.ABSENT)),
        (
            404,
            {"errors": [{"code": "MANIFEST_UNKNOWN", "message": "no"}]},
            FoundImage(Presence.ABSENT, words="MANIFEST_UNKNOWN: no"),
        ),
        (
            403,
            {"errors": [{"code": "DENIED"}, {"code": "X", "message": "y"}]},
            FoundImage(Presence.HIDDEN, words="DENIED; X: y"),
        ),
        (401, b"log  in\n", FoundImage(Presence.HIDDEN, words="log in")),
        (429, b"slow down", FoundImage(Presence.UNKNOWN, words="429 slow down")),
        (500, b"", FoundImage(Presence.UNKNOWN, words="500")),
        (400, b"x" * 300, FoundImage(Presence.UNKNOWN, words="400 " + "x" * 200)),
        (400, {"errors": [{}]}, FoundImage(Presence.UNKNOWN, words='400 {"errors": [{}]}')),
    ],
)
def test_a_refusal_is_quoted(registry: Registry, status: int, body: Any, found: FoundImage) -> None:
    assert ask(registry, Answer(body, status)) == found


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (urllib.error.URLError("no route"), "no route"),
        (TimeoutError("timed out"), "timed out"),
        (ValueError("bad URL"), "bad URL"),
    ],
)
def test_no_answer_is_no_verdict(registry: Registry, error: Exception, words: str) -> None:
    assert ask(registry, error) == FoundImage(Presence.UNKNOWN, words=words)


def test_the_platform_of_one_manifest_is_in_its_configuration(registry: Registry) -> None:
    blob = "https://r.io/v2/a/blobs/sha256:c0"
    registry.answers[blob] = [Answer({"os": "linux", "architecture": "arm64"})]
    found = ask(registry, Answer({"config": {"digest": "sha256:c0"}}))
    assert found == FoundImage(Presence.PRESENT, platforms=("linux/arm64",))
    registry.answers[blob] = [Answer(b"no JSON")]
    assert ask(registry, Answer({"config": {"digest": "sha256:c0"}})) == FoundImage(Presence.PRESENT)
    registry.answers[blob] = [urllib.error.URLError("gone")]
    assert ask(registry, Answer({"config": {"digest": "sha256:c0"}})) == FoundImage(Presence.PRESENT)


@pytest.mark.parametrize("body", [b"", b"[]", {"manifests": 3}, {"manifests": [{"platform": {"os": "linux"}}]}])
def test_a_manifest_that_cannot_be_read_has_no_platforms(registry: Registry, body: Any) -> None:
    assert ask(registry, Answer(body)) == FoundImage(Presence.PRESENT)


def test_a_basic_login_is_sent_when_the_registry_asks_for_it(registry: Registry) -> None:
    challenge = Answer(b"", 401, WWW_Authenticate="Basic realm=x")
    assert ask(registry, challenge, Answer({}), login=ME).presence is Presence.PRESENT
    assert registry.asked == [(URL, None), (URL, BASIC["Authorization"])]
    assert ask(registry, Answer(b"", 401, WWW_Authenticate="Basic realm=x")).presence is Presence.HIDDEN


CHALLENGE = 'Bearer realm="https://auth.io/token",service="r.io",scope="repository:a:pull",error="x"'
TOKEN = "https://auth.io/token?service=r.io&scope=repository%3Aa%3Apull"


@pytest.mark.parametrize("login", [None, ME])
@pytest.mark.parametrize("document", [{"token": "t1"}, {"access_token": "t1"}, {"token": "", "access_token": "t1"}])
def test_a_token_is_fetched_for_the_scope_that_the_registry_names(
    registry: Registry, login: Login | None, document: dict[str, str]
) -> None:
    registry.answers[TOKEN] = [Answer(document)]
    answers = Answer(b"", 401, Www_Authenticate=CHALLENGE), Answer({})
    assert ask(registry, *answers, login=login).presence is Presence.PRESENT
    assert registry.asked == [(URL, None), (TOKEN, login and BASIC["Authorization"]), (URL, "Bearer t1")]


@pytest.mark.parametrize("answer", [{}, [], {"token": None}, None])
def test_without_a_token_the_image_is_hidden(registry: Registry, answer: Any) -> None:
    registry.answers[TOKEN] = [Answer(b"", 403) if answer is None else Answer(answer)]
    assert ask(registry, Answer(b"", 401, Www_Authenticate=CHALLENGE)).presence is Presence.HIDDEN
    assert len(registry.asked) == 2


@pytest.mark.parametrize("realm", ["http://auth.io/token", "file:///etc/passwd", "ftp://auth.io", ""])
def test_a_login_is_sent_to_no_token_server_without_encryption(registry: Registry, realm: str) -> None:
    challenge = Answer(b"", 401, Www_Authenticate=f'Bearer realm="{realm}",service="x"')
    assert ask(registry, challenge, login=ME).presence is Presence.HIDDEN
    assert registry.asked == [(URL, None)]


@pytest.mark.parametrize("realm", ["http://127.0.0.1:5001/token", "http://localhost/token"])
def test_a_token_server_of_this_machine_may_be_without_encryption(registry: Registry, realm: str) -> None:
    registry.answers[f"{realm}?service=x"] = [Answer({"token": "t"})]
    challenge = Answer(b"", 401, Www_Authenticate=f'bearer realm="{realm}",service="x"')
    assert ask(registry, challenge, Answer({})).presence is Presence.PRESENT


# --- Docker's settings ------------------------------------------------------------------------------------------------


def test_dockers_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    assert docker_folder() == tmp_path
    monkeypatch.setenv("DOCKER_CONFIG", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert docker_folder() == tmp_path / ".docker"


@pytest.fixture
def write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Any], None]:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    return lambda document: void((tmp_path / "config.json").write_text(json.dumps(document)))


def void(_: object) -> None:
    """Nothing, so that a lambda can be a statement."""


def encoded(text: str) -> dict[str, str]:
    return {"auth": base64.b64encode(text.encode()).decode()}


def test_a_stored_login_is_found_by_its_registry(write: Callable[[Any], None]) -> None:
    assert find_docker_login("ghcr.io") is None
    write({"auths": {"ghcr.io": encoded("me:a:b"), "https://index.docker.io/v1/": encoded("hub:x"), "q.io": {}}})
    assert find_docker_login("ghcr.io") == Login("me", "a:b")
    assert find_docker_login("") == Login("hub", "x")
    assert find_docker_login("q.io") is None
    assert find_docker_login("other.io") is None


@pytest.mark.parametrize(
    "document",
    [
        [],
        None,
        {},
        {"auths": None},
        {"auths": {"r.io": encoded("nocolon")}},
        {"auths": {"r.io": {"auth": "?"}}},
        {"auths": {"r.io": 3}},
        {"auths": []},
    ],
)
def test_settings_in_another_format_hold_no_login(write: Callable[[Any], None], document: Any) -> None:
    write(document)
    assert find_docker_login("r.io") is None


@pytest.mark.parametrize(
    ("host", "program", "key"),
    [
        ("ecr.aws", "docker-credential-ecr-login", "ecr.aws"),
        ("ghcr.io", "docker-credential-desktop", "ghcr.io"),
        ("", "docker-credential-desktop", "https://index.docker.io/v1/"),
    ],
)
def test_a_helper_is_asked_for_the_registry(
    write: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch, host: str, program: str, key: str
) -> None:
    asked: list[tuple[list[str], str]] = []

    def run(words: list[str], *, input: str, **options: Any) -> subprocess.CompletedProcess[str]:
        asked.append((words, input))
        assert options["check"]
        return subprocess.CompletedProcess(words, 0, json.dumps({"Username": "u", "Secret": "s"}), "")

    monkeypatch.setattr(subprocess, "run", run)
    write({"credHelpers": {"ecr.aws": "ecr-login"}, "credsStore": "desktop", "auths": {"ghcr.io": encoded("x:y")}})
    assert find_docker_login(host) == Login("u", "s")
    assert asked == [([program, "get"], key)]


@pytest.mark.parametrize("said", ["", "[]", "{}", '{"Username": "u"}', "null"])
def test_a_helper_without_an_answer_has_no_login(
    write: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    def run(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if not said:
            raise subprocess.CalledProcessError(1, words)
        return subprocess.CompletedProcess(words, 0, said, "")

    monkeypatch.setattr(subprocess, "run", run)
    write({"credsStore": "desktop"})
    assert find_docker_login("r.io") is None


@pytest.mark.parametrize("helper", ["../evil", "a b", "x;y", "a/b"])
def test_a_helper_with_a_path_is_not_started(
    write: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch, helper: str
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a program was started"))
    write({"credsStore": helper, "auths": {"r.io": encoded("me:x")}})
    assert find_docker_login("r.io") == Login("me", "x")
