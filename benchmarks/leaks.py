"""What is left when making or removing a cluster is killed, or refused, at each of its requests: it has to be nothing.

The boundaries come from the doubles' logs of an undisturbed pass. At each, a process of its own is killed, or gets the
trouble as its answer; then one command removes the cluster by its name alone, from an empty data directory, and what
the cloud still has is counted. Prints a table; the exit code is 1 if anything was left.

For EKS, troubles that pass come at every request of one pass, the first time that it is asked; all others are passes
of their own. The clusters have an end (--ttl) and an image repository, whose timer, identity and repository count, too.
"with leftovers": AWS' own services have put endpoints and rules between groups into the network, and interfaces detach
slowly; "busy": Google upgrades the cluster by itself in between.
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
    parser.add_argument("providers", nargs="*", default=["gke", "eks"], help="default: gke eks")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every Nth boundary")
    given = parser.parse_args()
    print(f"{'cloud':<6}{'work':<10}{'trouble':<24}{'boundaries':>10}{'leaked':>8}")
    boundaries = leaked = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in given.providers:
            for row in {"gke": _gke, "eks": _eks}[name](Path(folder), given.every):
                print(f"{row[0]:<6}{row[1]:<10}{row[2]:<24}{row[3]:>10}{row[4]:>8}", flush=True)
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


def _gke(folder: Path, every: int) -> Iterator[Row]:
    from tests.fakes.gke import Google
    from tests.fakes.zygote import Zygote

    google = Google(folder / "google")
    zygote = Zygote(
        *("mlbench_cli.app", "mlbench_cli.commands.create_cluster", "mlbench_cli.commands.delete_cluster"),
        *(
            "providers.gke.end_timer",
            "providers.gke.repository",
            "providers.lifecycle",
            "providers.gke.plan",
            "providers.gke.discovery",
            "google.cloud.container_v1",
        ),
        *("google.auth", "google.auth.transport.requests", "urllib3", "yaml"),
    )
    create = ["create-cluster", "gke", "2", "ref", "--gpu-type", "l4", "--spot", "--yes"]
    create += ["--ttl", "2h", "--registry", "auto"]
    delete = ["delete-cluster", "gke", NAME, "--yes"]
    homes = iter(range(1_000_000))

    def client(words: list[str]) -> int:
        home = str(folder / f"home{next(homes)}")
        assert google.world.pidfile is not None
        return zygote.run(words, {**google.environment, "MLBENCH_HOME": home}, google.world.pidfile)[0]

    def leaks(number: int, kind: str, words: list[str], before: Callable[[], object]) -> bool:
        """Whether trouble at that request of `words` leaves anything, after it has passed and all was removed."""
        google.reset()
        before()
        google.world.trouble = {len(google.world.log) + number: kind}
        client(words)
        google.world.trouble = {}
        client(delete)
        # A binding to the account of a cluster that is gone is deleted with the record of the machine that has it.
        return bool(google.world.clusters or google.world.repositories)

    try:
        google.reset()
        client(create)
        making = len(google.world.log)
        client(delete)
        removing = len(google.world.log) - making
        for work, count, words, before in (
            ("making", making, create, lambda: None),
            ("removing", removing, delete, lambda: client(create)),
        ):
            for kind, order in GKE_TROUBLE.items():
                numbers = range(0, count, every)
                yield "gke", work, WORDS[kind], len(numbers), sum(leaks(at, order, words, before) for at in numbers)

        def upgrade() -> None:
            client(create)
            google.world.own_upgrade = 3

        numbers = range(0, removing, every)
        leaked = sum(leaks(at, GKE_TROUBLE["kill"], delete, upgrade) for at in numbers)
        yield "gke", "removing", "kill -9, busy", len(numbers), leaked
    finally:
        zygote.close()
        google.close()


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
    """How many of the cases leave something when they are removed by name, from an empty data directory."""
    from tests.contract.providers.eks_world import together

    together([case.removing for case in cases])
    return sum(bool(case.list_left()) for case in cases)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    os.environ.setdefault("NO_COLOR", "1")
    sys.exit(main())
