"""What is left when making or removing a cluster is killed, or refused, at each of its requests: it has to be nothing.

The boundaries come from the doubles' logs of an undisturbed pass. At each, a process of its own is killed, or gets the
trouble as its answer; then one command removes the cluster by its name alone, from an empty data folder, and what
the cloud still has is counted. Prints a table; the exit code is 1 if anything was left.

For EKS, troubles that pass come at every request of one pass, the first time that it is asked; all others are passes
of their own. The clusters have an end (--ttl) and an image repository, whose timer, identity and repository count, too.
"with leftovers": AWS' own services have put endpoints and rules between groups into the network, and interfaces detach
slowly; "busy": Google upgrades the cluster by itself in between; "fast network": machines with GPUDirect-TCPX, whose
VPC networks count, too; "failover": the first zone has no machines, and what has come there is removed before the next
one is tried. There the same command goes on once after a kill, before all is removed.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NAME = "ref-2"
Row = tuple[str, str, str, int, int]  # cloud, work, trouble, boundaries, leaked
WORDS = {
    "kill": "kill -9",
    "throttle": "throttled",
    "error": "5xx",
    "error-after": "5xx, though done",
    "cut": "no answer",
    "cut-after": "no answer, though done",
    "deny": "no permission",
    "quota": "quota",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("providers", nargs="*", default=["gke", "eks", "aks"], help="default: all")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every Nth boundary")
    parser.add_argument("--only", default="", metavar="TEXT", help="of GKE's rows those whose trouble has this text")
    given = parser.parse_args()
    print(f"{'cloud':<6}{'work':<10}{'trouble':<28}{'boundaries':>10}{'leaked':>8}")
    boundaries = leaked = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in given.providers:
            if name == "gke":
                rows = _gke(Path(folder), given.every, given.only)
            else:
                rows = (_aks if name == "aks" else _eks)(Path(folder), given.every)
            for row in rows:
                print(f"{row[0]:<6}{row[1]:<10}{row[2]:<28}{row[3]:>10}{row[4]:>8}", flush=True)
                boundaries, leaked = boundaries + row[3], leaked + row[4]
    print(f"leaked {leaked} of {boundaries}, wanted 0: {'NOT REACHED' if leaked else 'reached'}")
    return 1 if leaked else 0


# --- GKE --------------------------------------------------------------------------------------------------------------

GKE_TROUBLE = {
    "kill": "kill-after",
    "throttle": "THROTTLED-before",
    "error": "UNAVAILABLE-before",
    "error-after": "INTERNAL-after",
    "cut": "DEADLINE_EXCEEDED-before",
    "cut-after": "DEADLINE_EXCEEDED-after",
    "deny": "PERMISSION_DENIED-before",
    "quota": "RESOURCE_EXHAUSTED-before",
}


def _gke(folder: Path, every: int, only: str) -> Iterator[Row]:
    from tests.fakes.gke import Google
    from tests.fakes.zygote import Zygote

    google = Google(folder / "google")
    zygote = Zygote(
        *("mlbench_cli.app", "mlbench_cli.commands.create_cluster", "mlbench_cli.commands.delete_cluster"),
        *("providers.lifecycle", "providers.gke.provider", "providers.gke.discover", "google.cloud.container_v1"),
        *("google.auth", "google.auth.transport.requests", "urllib3", "yaml"),
    )
    create = ["create-cluster", "gke", "2", "ref", "--yes", "--ttl", "2h", "--registry", "auto"]
    small = [*create, "--gpu-type", "l4", "--spot"]
    fast = [*create, "--machine-type", "a3-highgpu-8g", "--fast-network", "--probe-image", "none"]
    failover = [*create, "--machine-type", "n1-standard-4", "--zones", "europe-west1-b,europe-west1-d"]
    delete = ["delete-cluster", "gke", NAME, "--yes"]
    homes = iter(range(1_000_000))

    def client(words: list[str], home: str) -> int:
        assert google.world.pidfile is not None
        return zygote.run(words, {**google.environment, "MLBENCH_HOME": home}, google.world.pidfile)[0]

    def new_home() -> str:
        return str(folder / f"home{next(homes)}")

    def reset(words: list[str]) -> None:
        google.reset(**({} if words is small else {"quotas": {}}))
        google.world.empty_zones = {"europe-west1-b"} if words is failover else set()

    def leaks(number: int, kind: str, words: list[str], before: Callable[[], object], *, again: bool = False) -> bool:
        """Whether trouble at that request of `words` leaves anything, after it has passed and all was removed.

        `again`: the same command goes on first, from the same data folder.
        """
        home = new_home()
        before()
        google.world.trouble = {len(google.world.log) + number: kind}
        client(words, home)
        google.world.trouble = {}
        if again and client(words, home):
            return True
        client(delete, new_home())
        # A binding to the account of a cluster that is gone is deleted with the record of the machine that has it.
        return bool(google.world.clusters or google.world.repositories or google.world.networks.found)

    def count_requests(words: list[str]) -> tuple[int, int]:
        """The number of requests of a calm pass of `words`, and of the removal after it."""
        reset(words)
        client(words, new_home())
        making = len(google.world.log)
        client(delete, new_home())
        return making, len(google.world.log) - making

    def make(words: list[str]) -> None:
        reset(words)
        client(words, new_home())

    def upgrade() -> None:
        make(small)
        google.world.own_upgrade = 3

    try:
        for words, label, orders in (
            (small, "", GKE_TROUBLE),
            (fast, ", fast network", {kind: GKE_TROUBLE[kind] for kind in ("kill", "error-after", "deny")}),
        ):
            making, removing = count_requests(words)
            for work, count, subject, before in (
                ("making", making, words, partial(reset, words)),
                ("removing", removing, delete, partial(make, words)),
            ):
                numbers = range(0, count, every)
                for kind, order in orders.items():
                    if only not in WORDS[kind] + label:
                        continue
                    leaked = sum(leaks(at, order, subject, before) for at in numbers)
                    yield "gke", work, WORDS[kind] + label, len(numbers), leaked
            if words is small and only in "kill -9, busy":
                numbers = range(0, removing, every)
                leaked = sum(leaks(at, GKE_TROUBLE["kill"], delete, upgrade) for at in numbers)
                yield "gke", "removing", "kill -9, busy", len(numbers), leaked
        if only not in "kill -9, failover":
            return
        making, _ = count_requests(failover)
        numbers = range(0, making, every)
        leaked = sum(leaks(at, GKE_TROUBLE["kill"], failover, partial(reset, failover), again=True) for at in numbers)
        yield "gke", "making", "kill -9, failover", len(numbers), leaked
    finally:
        zygote.close()
        google.close()


# --- AKS --------------------------------------------------------------------------------------------------------------

AKS_TROUBLE = {
    "kill": "kill-after",
    "throttle": "429-before",
    "error": "503-before",
    "error-after": "500-after",
    "deny": "403-before",
    "quota": "409 QuotaExceeded-before",
}


def _aks(folder: Path, every: int) -> Iterator[Row]:
    """A cluster with all of its parts: GPUs, spot, a zone, a placement group, a registry, an end."""
    from tests.fakes.azure_web import AzureDouble
    from tests.fakes.zygote import Zygote

    double = AzureDouble(folder / "azure")
    zygote = Zygote(
        *("mlbench_cli.app", "mlbench_cli.commands.create_cluster", "mlbench_cli.commands.delete_cluster"),
        *("providers.lifecycle", "providers.aks.provider", "providers.aks.discover", "providers.workload_cleanup"),
        *("azure.core", "azure.identity", "msal", "requests", "urllib3", "yaml", "jinja2", "kubernetes.client"),
    )
    create = ["create-cluster", "aks", "2", "ref", "--yes", "--ttl", "2h", "--registry", "auto", "--gpu-type", "t4"]
    create += ["--spot", "--zones", "1", "--compact-placement"]
    delete = ["delete-cluster", "aks", NAME, "--yes"]
    homes = iter(range(1_000_000))

    def client(words: list[str]) -> int:
        assert double.world.pidfile is not None
        home = str(folder / f"azure-home{next(homes)}")
        return zygote.run(words, {**double.environment, "MLBENCH_HOME": home}, double.world.pidfile)[0]

    def leaks(number: int, order: str, words: list[str]) -> bool:
        """Whether trouble at that request of `words` leaves anything, after it has passed and all was removed."""
        double.reset()
        if words is delete:
            client(create)
        double.world.trouble = {len(double.world.log) + number: order}
        client(words)
        double.world.trouble = {}
        client(delete)
        return bool(double.world.groups or double.world.clusters or double.world.others)

    try:
        client(create)
        making = len(double.world.log)
        client(delete)
        for work, count, words in (("making", making, create), ("removing", len(double.world.log) - making, delete)):
            numbers = range(0, count, every)
            for kind, order in AKS_TROUBLE.items():
                yield "aks", work, WORDS[kind], len(numbers), sum(leaks(at, order, words) for at in numbers)
    finally:
        zygote.close()
        double.close()


# --- EKS --------------------------------------------------------------------------------------------------------------


def _eks(folder: Path, every: int) -> Iterator[Row]:
    from tests.contract.providers import eks_world as world
    from tests.fakes.aws_server import AwsServer

    aws = AwsServer()
    try:
        world.warm(aws)
        reference = world.Case(aws, folder, NAME)
        world.together([reference.making])
        making = reference.log
        made = aws.copy()
        aws.calm(NAME)
        world.together([reference.removing])
        yield from _eks_making(aws, folder, making[::every], every)
        yield from _eks_removing(made, folder, reference.log, every)
        made.stop()
        yield _eks_leftovers(aws, folder, every)
    finally:
        aws.stop()


def _eks_making(aws: Any, folder: Path, log: list[str], every: int) -> Iterator[Row]:
    from tests.contract.providers.eks_world import Case, make, pattern, together

    cases = [Case(aws, folder, f"kill{number}-2") for number in range(len(log))]
    together([start_killed_at(case, lambda case: make(case.name, case.folder / "home"), at * every)
              for at, case in enumerate(cases)])  # fmt: skip
    yield "eks", "making", WORDS["kill"], len(cases), count_leaking(cases)
    for kind in ("throttle", "error", "error-after", "cut", "cut-after"):
        case = Case(aws, folder, f"pass-{kind}-2").order(kind, once_each=True)
        together([case.making])
        yield "eks", "making", WORDS[kind], len(set(case.log)), count_leaking([case])
    for kind in ("deny", "quota"):
        lines = list(dict.fromkeys(log))
        cases = [Case(aws, folder, f"{kind}{number}-2") for number in range(len(lines))]
        for case, line in zip(cases, lines, strict=True):
            case.order(kind, action=pattern(line, NAME, case.name), times=1000)
        together([case.making for case in cases])
        yield "eks", "making", WORDS[kind], len(cases), count_leaking(cases)


def order_once(kind: str, case: Any, number: int) -> None:
    """Make every request of a kind that `case` sends fail once in the way named `kind`."""
    case.order(kind, once_each=True)


def _eks_removing(made: Any, folder: Path, log: list[str], every: int) -> Iterator[Row]:
    from tests.contract.providers.eks_world import Case, pattern, remove, together

    def each(kind: str, count: int, order: Callable[[Any, int], object]) -> int:
        """The number of boundaries at which something was left; each has a copy of a cloud with the cluster in it."""
        left = 0
        for number in range(count):
            case = Case(made.copy(), folder / f"{kind}{number}", NAME)
            case.aws.calm(NAME)
            order(case, number)
            at = number * every if kind == "kill" else None
            together([partial(case.start_process, partial(remove, NAME, case.folder / "h"), kill_at=at)])
            left += count_leaking([case])
            case.aws.stop()
        return left

    kills = len(log[::every])
    yield "eks", "removing", WORDS["kill"], kills, each("kill", kills, lambda case, number: None)
    for kind in ("throttle", "error", "error-after", "cut", "cut-after"):
        count = len(set(log))
        yield (
            *("eks", "removing", WORDS[kind], count),
            each(kind, 1, partial(order_once, kind)),
        )
    lines = list(dict.fromkeys(log))[::every]

    def deny(case: Any, number: int) -> None:
        case.order("deny", action=pattern(lines[number], NAME, NAME), times=1000)

    yield "eks", "removing", WORDS["deny"], len(lines), each("deny", len(lines), deny)


def _eks_leftovers(aws: Any, folder: Path, every: int) -> Row:
    """Kills at every boundary of a removal while others' endpoints, rules and interfaces are in the network."""
    from tests.contract.providers.eks_world import Case, remove, together

    name = "left-2"
    aws.rules(guardduty=True, crossed_groups=True, detach_looks=3)
    together([Case(aws, folder, name).making])
    made = aws.copy()
    aws.calm(name)
    reference = Case(aws, folder, name)
    together([reference.removing])
    kills = range(0, len(reference.log), every)
    leaked = 0
    for at in kills:
        case = Case(made.copy(), folder / f"leftovers{at}", name)
        case.aws.calm(name)
        together([partial(case.start_process, partial(remove, name, case.folder / "h", 60.0), kill_at=at)])
        leaked += count_leaking([case])
        case.aws.stop()
    made.stop()
    return "eks", "removing", "kill -9, with leftovers", len(kills), leaked


def start_killed_at(case: Any, work: Callable[[Any], object], at: int) -> Callable[[], int]:
    return lambda: int(case.start_process(lambda: work(case), kill_at=at))


def count_leaking(cases: Sequence[Any]) -> int:
    """How many of the cases leave something when they are removed by name, from an empty data folder."""
    from tests.contract.providers.eks_world import together

    together([case.removing for case in cases])
    return sum(bool(case.list_left()) for case in cases)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    os.environ.setdefault("NO_COLOR", "1")
    sys.exit(main())
