"""A world of stand-ins for `docker` and `kind`, and a data folder of its own."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.app import run
from mlbench_cli.errors import MlbenchError
from providers.aks import api as aks_api
from providers.gke import api
from tests.contract.providers.eks_world import become_for_a_test, forget
from tests.fakes.aws_server import AwsClient, find_aws
from tests.fakes.azure_arm import World as AzureWorld
from tests.fakes.azure_web import AzureDouble
from tests.fakes.gke import Google
from tests.fakes.gke import World as GkeWorld
from tests.fakes.kind_tools import World
from tests.fakes.kube_api import KubeApi
from tests.fakes.kubelet import Kubelet
from tests.fakes.registry import FakeRegistry

_aws: list[AwsClient] = []  # none or one: moto takes seconds to load
IMAGES = {"registry:3": "sha256:01", "my/task:1": "sha256:02", "node": "sha256:03"}


@pytest.fixture(autouse=True)
def no_docker(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Docker of this machine is nobody's to search or to clean up: in its place there is an empty one."""
    empty = World(tmp_path_factory.mktemp("docker"))
    monkeypatch.setenv("KIND_WORLD", str(empty.path))
    monkeypatch.setenv("PATH", f"{empty.bin}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(tmp_path / "world")
    made.change(images=IMAGES)
    monkeypatch.setenv("KIND_WORLD", str(made.path))
    monkeypatch.setenv("PATH", f"{made.bin}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "home"))
    # tempfile looks at TMPDIR only once in a process.
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    _sign_out(tmp_path, monkeypatch)
    return made


@pytest.fixture
def nodes(world: World, tmp_path: Path) -> Iterator[KubeApi]:
    """The API of every KIND cluster of the world, whose pods really run."""
    with KubeApi() as server, Kubelet(server, tmp_path / "pods"):
        world.change(server=server.url)
        yield server


def _sign_out(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """No cloud has credentials here: neither this machine's own nor those that another test of this process had."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "GOOGLE_", "CLOUDSDK_"))]:
        patch.delenv(name)
    patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    patch.setenv("AWS_CONFIG_FILE", str(folder / "no-aws-config"))
    patch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(folder / "no-aws-credentials"))
    patch.setenv("AZURE_CONFIG_DIR", str(folder / "no-azure"))
    patch.setenv("CLOUDSDK_CONFIG", str(folder / "no-gcloud"))
    patch.setenv("NO_GCE_CHECK", "true")
    _forget_credentials()
    forget_azure_credentials()
    forget()


@pytest.fixture(scope="module")
def aws_server() -> Iterator[AwsClient]:
    """A double of AWS for all tests of a file, a copy of an empty one. Who leaves things in it makes another copy."""
    if not _aws:
        _aws.append(find_aws())
    server = _aws[0].copy()
    yield server
    server.stop()


@pytest.fixture
def aws(aws_server: AwsClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AwsClient:
    """The double, of which this process is a client."""
    become_for_a_test(aws_server, monkeypatch)
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "home"))
    return aws_server


@pytest.fixture(scope="module")
def google(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Google]:
    servers = Google(tmp_path_factory.mktemp("google"))
    yield servers
    servers.close()


@pytest.fixture
def gke_world(google: Google, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GkeWorld]:
    """An empty project, of which this process is a client."""
    become_client(google.environment, "GOOGLE_CLOUD_PROJECT", tmp_path, monkeypatch)
    _forget_credentials()
    yield google.reset()
    _forget_credentials()  # or the next test of another provider would still be logged in


def error_of(work: Callable[[], object]) -> MlbenchError | None:
    """The error in which it ends."""
    try:
        work()
    except MlbenchError as error:
        return error
    return None


def become_client(environment: Mapping[str, str], account: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Give this process the double's addresses and credentials and an empty data folder, but no `account`."""
    for key, value in environment.items():
        patch.setenv(key, value)
    patch.delenv(account, raising=False)
    patch.setenv("MLBENCH_HOME", str(folder / "home"))


def _forget_credentials() -> None:
    for cached in (api.client, api.credentials, api.token):
        cached.cache_clear()


@pytest.fixture(scope="module")
def azure_double(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzureDouble]:
    servers = AzureDouble(tmp_path_factory.mktemp("azure"))
    yield servers
    servers.close()


@pytest.fixture
def azure_world(azure_double: AzureDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AzureWorld]:
    """An empty subscription, of which this process is a client."""
    become_client(azure_double.environment, "AZURE_SUBSCRIPTION_ID", tmp_path, monkeypatch)
    forget_azure_credentials()
    yield azure_double.reset()
    forget_azure_credentials()


def forget_azure_credentials() -> None:
    for cached in (aks_api.client, aks_api.credentials):
        cached.cache_clear()


@dataclass(frozen=True)
class Told:
    """What a command answered."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Told]:
    """`mlbench WORDS` in this process."""
    return lambda *words: Told(run(list(words)), *capsys.readouterr())


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRegistry]:
    """A registry of images that stands for that of any cloud."""
    server = FakeRegistry()
    monkeypatch.setenv("MLBENCH_REGISTRY_ENDPOINT", server.url)
    yield server
    server.close()
