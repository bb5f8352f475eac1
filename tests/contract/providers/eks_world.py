"""What the tests of EKS share: clusters made and removed by processes of their own, against the double of AWS."""

import os
import re
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from mlbench_cli.errors import MlbenchError
from mlbench_cli.model.run import Cluster
from mlbench_cli.storage.store import Store
from providers.eks.api import aws_in, session
from providers.eks.options import EksOptions
from providers.eks.provider import EksProvider
from providers.lifecycle import down, up
from tests.fakes.aws_server import AwsClient

REGION = "eu-west-1"
AT_ONCE = 4
made_for: list[str] = []  # the double that this process has clients for
PATIENCE = 3.0  # seconds after which a case that waits for the end of patience has it
LONG_PATIENCE = 60.0  # for trouble that passes, on a machine that is busy
# With all that can be left behind: an end in the cloud (`make` adds it) and an image repository among them.
OPTIONS = EksOptions(
    machine_type="g4dn.xlarge", placement_group=True, admin=("arn:aws:iam::123456789012:role/ci",), registry="auto"
)


def make(name: str, home: Path, options: EksOptions = OPTIONS, nodes: int = 2, patience: float = PATIENCE) -> Cluster:
    home.mkdir(parents=True, exist_ok=True)
    provider = EksProvider()
    cluster = provider.new_cluster(name, nodes, options)
    if options is OPTIONS:
        cluster = replace(cluster, details={**cluster.details, "expires": int(time.time()) + 7200})
    return up(cluster, provider.resources(cluster), Store(home), patience=patience)


def remove(name: str, home: Path, patience: float = PATIENCE) -> None:
    """By the name alone, as from another machine."""
    home.mkdir(parents=True, exist_ok=True)
    cluster = Cluster(name, "eks")
    down(cluster, EksProvider().resources(cluster), Store(home), patience=patience)


def warm(aws: AwsClient) -> None:
    """Have the clients of boto3 made before processes are forked: it takes longer than all that is asked of them."""
    aws.become("warm", REGION)
    for service in ("cloudformation", "eks", "ec2", "autoscaling", "sts"):
        aws_in(REGION).client(service)


def forget() -> None:
    """The next one starts from its own environment."""
    made_for.clear()
    aws_in.cache_clear()
    session.cache_clear()


def become_for_a_test(aws: AwsClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process as the client "me" of a double. boto3's clients are made once for all such tests."""
    for key, value in aws.environment("me", REGION).items():
        monkeypatch.setenv(key, value)
    if made_for != [aws.url]:
        aws_in.cache_clear() if made_for else forget()  # the session keeps the models of services that it has read
        made_for[:] = [aws.url]
    # The double may be as busy as its machine.
    monkeypatch.setenv("MLBENCH_CALL_SECONDS", "120")
    session().get_credentials().access_key = "me"
    aws.calm("me")


def become(aws: AwsClient, name: str) -> None:
    """A client of that name: of the double for which clients were made, or of a copy of it."""
    if os.environ.get("AWS_ENDPOINT_URL") != aws.url:
        aws_in.cache_clear()
    aws.become(name, REGION)
    session().get_credentials().access_key = name


class Case:
    """One client of the double, in a process of its own, with a cluster of its own."""

    def __init__(self, aws: AwsClient, folder: Path, name: str) -> None:
        self.aws = aws
        self.folder = folder / name
        self.name = name
        self.text = ""

    def order(self, kind: str, **more: object) -> "Case":
        self.aws.order(self.name, kind, **more)
        return self

    def making(self) -> int:
        return self.start_process(lambda: make(self.name, self.folder / "home"))

    def removing(self) -> int:
        """From an empty data folder."""
        self.aws.calm(self.name)
        return self.start_process(lambda: remove(self.name, self.folder / "empty"))

    def start_process(self, work: Callable[[], object], kill_at: int | None = None) -> int:
        """The process that does it. Its exit code is the error's; it is killed at request number `kill_at`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        child = os.fork()
        if child:
            return child
        code = 1
        try:
            become(self.aws, self.name)
            if kill_at is not None:
                self.aws.order(self.name, "kill-after", number=kill_at, pid=os.getpid())
            work()
            code = 0
        except MlbenchError as error:
            (self.folder / "error").write_text(f"{error.message}\n{error.hint}")
            code = error.exit_code
        except BaseException:
            traceback.print_exc()
        os._exit(code)

    @property
    def error(self) -> str:
        return (self.folder / "error").read_text()

    @property
    def log(self) -> list[str]:
        return [f"{entry['action']} {entry['target']}" for entry in self.aws.log(self.name)]

    def state(self) -> tuple[str, ...]:
        return self.aws.state(self.name)

    def list_left(self) -> list[str]:
        return self.aws.list_left(self.name)


def together(starts: Sequence[Callable[[], int]]) -> list[int]:
    """The exit codes of processes, some at a time; -9 for one that was killed."""
    codes: list[int] = []
    running: list[int] = []
    for start in starts:
        if len(running) == AT_ONCE:
            codes.append(wait_for_process(running.pop(0)))
        running.append(start())
    return codes + [wait_for_process(child) for child in running]


def wait_for_process(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Verified:
    """Situations from which a removal by name alone was shown to leave nothing; each is shown once."""

    def __init__(self) -> None:
        self.known: set[tuple[str, ...]] = set()

    def show(self, cases: Iterable[Case]) -> None:
        new: dict[tuple[str, ...], Case] = {}
        for case in cases:
            if (state := case.state()) not in self.known:
                new.setdefault(state, case)
        codes = together([case.removing for case in new.values()])
        failed = {case.name: case.error for case, code in zip(new.values(), codes, strict=True) if code}
        assert failed == {}
        assert {case.name: case.list_left() for case in new.values() if case.list_left()} == {}
        self.known |= new.keys()


def pattern(line: str, reference: str, name: str) -> str:
    """The log's line of one cluster, for the orders that are given on another. Names that AWS makes differ."""
    line = re.sub(r"(vpc|eni|sg|subnet)-[0-9a-f]+", "IDENTIFIER", line)
    return re.escape(line.replace(reference, name)).replace("IDENTIFIER", r"[a-z]+-[0-9a-f]+")


def list_made(aws: AwsClient, action: str, client: str = "me") -> list[dict[str, Any]]:
    """What CloudFormation has asked for in a client's name."""
    return [entry["parameters"] for entry in aws.log(f"{client}/cloudformation") if entry["action"] == action]
