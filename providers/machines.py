"""The machines of clouds: what they have and cost (machines.csv), the choice of one, and checks of what was asked for.

A row of the table is about a machine type, or another part of a cluster, in one region; "any" stands for all regions
without a row. Prices are in USD per piece and hour, before tax and discounts, and of the dates beside them: an
orientation, no offer. What is in no row is unknown, and never free; `unlisted` says why a cloud lists no price. A table
of the user's, machines.csv in mlbench's configuration directory, goes before this one, row by row; it needs the columns
cloud, item, region, and on_demand or spot. When a cluster is planned, the clouds are asked about machines that no table
has.
"""

import csv
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

from mlbench_cli.config import settings
from mlbench_cli.errors import CapacityError, MlbenchError, UsageError, did_you_mean
from mlbench_cli.util.text import counted
from providers.base import CloudOptions, PlanLine, RightsError
from providers.doctor import Check, Checklist, Topic

SHIPPED = Path(__file__).with_name("machines.csv")
CURRENCY = "USD"
ANY_REGION = "any"
# Where the prices are from.
SOURCES = {
    "gke": "Google's list prices, from google-cloud-pricing-cost-calculator and SkyPilot",
    "eks": "AWS' list prices, from Karpenter and SkyPilot",
    "aks": "Azure's list prices, noted by third parties and not checked",
}


class Shape(NamedTuple):
    """What a machine type has. `network` is the documented rate of its ordinary network in Gbit/s, `cards` are network
    cards with EFA, and `gbits` is the rate of its fast network."""

    name: str
    gpu: str | None
    gpus: int
    vcpus: int | None
    network: float | None
    cards: int
    gbits: int | None


@cache
def list_clouds() -> tuple[str, ...]:
    """The clouds of the table."""
    return tuple(dict.fromkeys(row["cloud"] for row in _read(SHIPPED)))


@cache
def load_shapes(cloud: str) -> tuple[Shape, ...]:
    """The machine types of a cloud that the table describes, the smallest of equals first."""
    found: dict[str, Shape] = {}
    for row in _read(SHIPPED):
        if row["cloud"] == cloud and (row["gpu"] or row["vcpus"]):
            gpus, vcpus, cards, gbits = (int(row[name] or 0) for name in ("gpus", "vcpus", "cards", "gbits"))
            network = float(row["network"]) if row["network"] else None
            shape = Shape(row["item"], row["gpu"] or None, gpus, vcpus or None, network, cards, gbits or None)
            found.setdefault(shape.name, shape)
    return tuple(found.values())


# --- prices -----------------------------------------------------------------------------------------------------------


class _Offer(NamedTuple):
    item: str
    region: str
    spot: bool


class _Price(NamedTuple):
    amount: float
    as_of: str | None


@dataclass(frozen=True)
class PriceTable:
    """One cloud's prices. `source` names their origin, `version` the content."""

    source: str
    version: str
    layers: tuple[Mapping[_Offer, _Price], ...]  # the user's own first
    cloud: str
    unlisted: Mapping[str, str]  # why the cloud lists no price of an item
    currency: str = CURRENCY

    def price(self, item: str, region: str, *, spot: bool = False) -> float | None:
        """The price of a machine type or another part. A spot price is never derived from the on-demand price."""
        found = self._find(item, region, spot)
        return None if found is None else found.amount

    def line(self, what: str, count: int, item: str, region: str, *, spot: bool = False) -> PlanLine:
        """A part of a plan, with its price if it is known."""
        found = self._find(item, region, spot)
        if found is None:
            reasons = ["no table has a spot price for it"] if spot else []
            reasons += filter(None, [self.unlisted.get(item)])
            return PlanLine(
                *(what, count, None),
                on_demand=self.price(item, region) if spot else None,
                why_unknown=" and ".join(reasons) or "it is in no table",
                row=f"{self.cloud},{item},{region},{',' if spot else ''}PRICE",
            )
        return PlanLine(what, count, found.amount, found.as_of)

    def _find(self, item: str, region: str, spot: bool) -> _Price | None:
        offers = [_Offer(item, place, spot) for place in (region, ANY_REGION)]
        return next((layer[offer] for layer in self.layers for offer in offers if offer in layer), None)

    def ask_missing(
        self, items: Sequence[tuple[str, bool]], region: str, ask: Callable[[str, bool], float | None]
    ) -> Self:
        """The table with what `ask` knows of the items (machine, whether as spot) without a price in the region."""
        today = f"{datetime.now(UTC):%Y-%m-%d}"
        told = {
            _Offer(item, region, spot): _Price(amount, today)
            for item, spot in items
            if self._find(item, region, spot) is None and (amount := ask(item, spot)) is not None
        }
        return replace(self, layers=(*self.layers, told))

    def list_regions(self) -> list[str]:
        """The regions with prices."""
        return sorted({offer.region for layer in self.layers for offer in layer} - {ANY_REGION})

    def count_prices(self, region: str) -> int:
        """The number of parts with a known on-demand price in the region."""
        offers = (offer for layer in self.layers for offer in layer if not offer.spot)
        return len({offer.item for offer in offers if offer.region in (region, ANY_REGION)})


def user_price_file() -> Path:
    """The user's own table, which goes before the shipped one."""
    return settings.config_dir() / "machines.csv"


def load_prices(cloud: str) -> PriceTable:
    """The prices of one cloud: the user's own, then the shipped. Raises UsageError for a malformed table."""
    rows = _read(SHIPPED)
    shipped, source = _prices(rows, cloud), SOURCES.get(cloud, f"mlbench's {SHIPPED.name}")
    unlisted = {row["item"]: row["unlisted"] for row in rows if row["cloud"] == cloud and row.get("unlisted")}
    if not user_price_file().exists():
        return PriceTable(source, _digest(shipped), (shipped,), cloud, unlisted)
    own = _prices(_read(user_price_file()), cloud)
    version = f"{_digest(own)}, then {_digest(shipped)}"
    return PriceTable(f"your {user_price_file().name}, then {source}", version, (own, shipped), cloud, unlisted)


def _prices(rows: Sequence[Mapping[str, str]], cloud: str) -> dict[_Offer, _Price]:
    found = {}
    for row in rows:
        for column, spot in (("on_demand", False), ("spot", True)):
            if row["cloud"] == cloud and row.get(column):
                as_of = row.get("spot_as_of" if spot else "as_of") or None
                found[_Offer(row["item"], row["region"], spot)] = _Price(float(row[column]), as_of)
    return found


def _digest(prices: Mapping[_Offer, _Price]) -> str:
    """Eight hex digits that identify prices by their content."""
    return hashlib.sha256(repr(sorted(prices.items())).encode()).hexdigest()[:8]


def _read(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file, restval="", strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"The table {path} cannot be read: {error}.", hint=f"Compare it with {SHIPPED}") from None
    for number, row in enumerate(rows, 2):
        is_whole = all(row.get(column) for column in ("cloud", "item")) and "region" in row and None not in row
        if not is_whole or not all(_is_price(row.get(column) or "0") for column in ("on_demand", "spot")):
            raise UsageError(
                f"{path}, line {number}: a row has a cloud, an item, a region and prices, for example "
                "eks,g5.xlarge,us-east-1,1.006 below cloud,item,region,on_demand.",
                hint=f"Compare it with {SHIPPED}",
            )
    return rows


def _is_price(text: str) -> bool:
    try:
        return 0 <= float(text) < 1e6
    except ValueError:
        return False


# --- the choice of a machine, and checks of the numbers beside its name -----------------------------------------------


class Sized(Protocol):
    """A type of machine. `gpu` is None for one without; `vcpus` is None or 0 if they are not known."""

    @property
    def name(self) -> str: ...
    @property
    def gpu(self) -> str | None: ...
    @property
    def gpus(self) -> int: ...
    @property
    def vcpus(self) -> int | None: ...


M = TypeVar("M", bound=Sized)


@dataclass(frozen=True)
class GpuCatalog(Generic[M]):
    """The machines with GPUs of one cloud by name, the smallest of equals first.

    `names` are other names of the GPUs, in lower case; `too_old` are GPUs that current images do not support.
    """

    cloud: str
    machines: Mapping[str, M]
    names: Mapping[str, str] = field(default_factory=dict)
    too_old: Sequence[str] = ()

    @property
    def gpus(self) -> list[str]:
        """The table's names of all GPUs."""
        return list(dict.fromkeys(machine.gpu for machine in self.machines.values() if machine.gpu))

    def find_gpu(self, name: str) -> str:
        """The table's name of a GPU. Raises UsageError for one that is unknown or too old."""
        short = _shorten(name)
        known = {**{_shorten(gpu): gpu for gpu in self.gpus}, **self.names}
        hint = f"Available GPUs: {', '.join(self.gpus)}"
        if short in self.too_old:
            raise UsageError(
                f"{short} is too old for the CUDA version of current images, or no longer offered.", hint=hint
            )
        found = known.get(short)
        if found is None:
            raise UsageError(f'{self.cloud} has no GPU "{name}".{did_you_mean(short, list(known))}', hint=hint)
        return found

    def choose_smallest(self, gpu: str, count: int | None) -> M:
        """The smallest machine with `count` of the GPUs; without a count, with as few as any machine has.

        Raises UsageError if there is none.
        """
        fitting = [machine for machine in self.machines.values() if machine.gpu == gpu]
        counts = sorted({machine.gpus for machine in fitting})
        wanted = count or counts[0]
        exact = [machine for machine in fitting if machine.gpus == wanted]
        if not exact:
            listed = ", ".join(map(str, counts[:-1])) + " or " if len(counts) > 1 else ""
            having = {machine.gpu: None for machine in self.machines.values() if machine.gpus == wanted}
            alike = [other for other in having if other and _model_of(other) == _model_of(gpu)]
            raise UsageError(
                f"No machine has {wanted} × {gpu}; there are some with {listed}{counts[-1]}.",
                hint=f"With {wanted}: --gpu-type {', '.join(alike)}" if alike else self.list_with(gpu),
            )
        return min(exact, key=lambda machine: machine.vcpus or 0)

    def list_with(self, gpu: str) -> str:
        """A hint with the machines that have a GPU."""
        fitting = [f"{machine.name} ({machine.gpus})" for machine in self.machines.values() if machine.gpu == gpu]
        return f"Machines with {gpu}: {', '.join(fitting)}"

    def require_gpus(self, machine: M, num_gpus: int | None, gpu: str | None) -> M:
        """`machine`, if it has what was asked for. Raises UsageError, with machines that have."""
        if gpu is not None and gpu != machine.gpu:
            raise UsageError(f"{machine.name} has {machine.gpu or 'no GPU'}, not {gpu}.", hint=self.list_with(gpu))
        if num_gpus is not None and num_gpus != machine.gpus:
            same = [item for item in self.machines.values() if item.gpu == machine.gpu and item.gpus == num_gpus]
            raise UsageError(
                f"{machine.name} has {describe_gpus(machine)}, not {num_gpus}; machines are sold whole.",
                hint=f"--machine-type {same[0].name}, or leave out --num-gpus." if same else "Leave out --num-gpus.",
            )
        return machine


def _model_of(gpu: str) -> str:
    """The name of a GPU without its maker and variant: "h100" of "nvidia-h100-80gb" and of "h100-nvl"."""
    return _shorten(gpu).partition("-")[0]


def _shorten(gpu: str) -> str:
    """The name of a GPU in lower case, without its maker."""
    return gpu.lower().removeprefix("nvidia-").removeprefix("tesla-")


def describe_gpus(machine: Sized) -> str:
    """Number and type of a machine's GPUs, for messages."""
    return f"{machine.gpus} × {machine.gpu}" if machine.gpu else "no GPU"


def check_count(num_gpus: int | None) -> None:
    """Raise UsageError for a --num-gpus below 0."""
    if num_gpus is not None and num_gpus < 0:
        raise UsageError(f"--num-gpus {num_gpus}: the minimum is 0.")


def settle_gpus(
    machine: Any, told: tuple[str | None, int] | None, *, forced: int | None, asked: int | None, is_gpu_family: bool
) -> Any:
    """`machine` (a dataclass) with `forced` GPUs, else those that the cloud has told: type and number.

    `told` is None if the cloud could not be asked: then the table counts. `asked` is --num-gpus. Raises UsageError for
    a machine of a family with GPUs for which none are known: its nodes would be paid for and used as CPU machines.
    """
    gpu, count = told if told is not None else (machine.gpu, machine.gpus)
    if forced is not None:
        count = forced
    if count and not (gpu or machine.gpu):
        raise UsageError(f"The GPU type of {machine.name} is unknown.", hint="Name it with --gpu-type, such as h100.")
    if is_gpu_family and not count:
        raise UsageError(
            f"{machine.name} belongs to a family with GPUs, but their number is unknown.",
            hint="Set it with --gpus-per-node N.",
        )
    if asked is not None and asked != count:
        raise UsageError(
            f"A {machine.name} has {counted(count, 'GPU')}, not {asked}.",
            hint="Remove --num-gpus, or choose another type.",
        )
    return replace(machine, gpu=(gpu or machine.gpu) if count else None, gpus=count)


def check_forced(gpus: int | None) -> None:
    """Raise UsageError for a --gpus-per-node that no machine has."""
    if gpus is not None and not 1 <= gpus <= 64:
        raise UsageError(f"--gpus-per-node {gpus}: from 1 to 64.")


def machine_of(options: CloudOptions, choose: Callable[[str | None, int | None, str | None], M]) -> M:
    """The machine that the options name, by the `choose_machine` of their cloud.

    Raises UsageError if it has other GPUs than requested, or fewer vCPUs, as far as their number is known.
    """
    machine = choose(options.machine_type, options.num_gpus, options.gpu_type)
    if options.num_cpus is not None and machine.vcpus and options.num_cpus > machine.vcpus:
        raise UsageError(
            f"{machine.name} has {machine.vcpus} vCPUs, not {options.num_cpus}.",
            hint="Choose a larger --machine-type.",
        )
    return machine


@dataclass(frozen=True)
class Quota:
    """A limit of an account, and how much of it is left; None if the cloud tells only the limit."""

    name: str
    limit: float
    left: float | None
    unit: str = ""

    @classmethod
    def of_use(cls, name: str, limit: float, used: float, unit: str = "") -> Self:
        """A quota of which so much is used."""
        return cls(name, limit, limit - used, unit)

    def __str__(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        left = "" if self.left is None else f"{self.left:.9g} of "
        return f"{left}{self.limit:.9g}{unit} {'left' if left else 'in all'}"


def require_quotas(place: str, needs: Mapping[str, int], quotas: Mapping[str, Quota], hint: Callable[..., str]) -> None:
    """Raise CapacityError with every quota of `place` that has less left than is needed; unknown ones are skipped.

    `hint` makes the next command from the first of them and what is needed of it.
    """
    lacking = [(quotas[name], needed) for name, needed in needs.items() if name in quotas]
    lacking = [(quota, needed) for quota, needed in lacking if quota.left is not None and quota.left < needed]
    if not lacking:
        return
    listed = "; ".join(f"{quota.name} has {quota}, {needed} needed" for quota, needed in lacking)
    first, needed = lacking[0]
    raise CapacityError(
        f"The quota of {place} is too small: {listed}.",
        hint=hint(first, needed),
        details={"reason": "quota", "quota": first.name, "left": first.left, "needed": needed},
    )


def check_quotas(checklist: Checklist, quotas: Iterable[Quota], hint: str) -> Iterator[Check]:
    """A line for each quota: missing if nothing is left of it. None decides alone whether clusters can be created."""
    for quota in quotas:
        left = quota.limit if quota.left is None else quota.left
        yield checklist.result(Topic.QUOTA, str(quota), hint, of=quota.name, missing=left <= 0, optional=True)


def check_prices(checklist: Checklist, provider: str, region: str) -> Iterator[Check]:
    """Count the known prices of a region, with their date."""
    found = yield from checklist.ask("prices", lambda: load_prices(provider))
    if found is None:
        return
    known = found.count_prices(region)
    hint = f"Other prices are unknown; your price table: {user_price_file()}"
    yield checklist.result(
        "prices", f"{known} known in {region}; {found.source}", hint, missing=known <= 1, optional=True
    )


# --- what plans say on every cloud ------------------------------------------------------------------------------------


def check_if_permitted(places: str, check: Callable[[], list[str]]) -> list[str]:
    """The warnings of a check of machines and quotas, or one that it was not possible: for lack of a right, or by an
    error of no known kind. Raises what else is wrong."""
    try:
        return check()
    except MlbenchError as error:
        if type(error) not in (RightsError, MlbenchError):
            raise
        return [f"Whether {places} has the machines and the quota allows them could not be checked: {error.message}"]


def warn_unchecked(login: str) -> str:
    """The warning about a sketch, which is made without credentials."""
    return (
        "Not checked, because there are no credentials: versions, quotas, and whether these machines are offered "
        f"there. To check them: {login}"
    )


def warn_slow_network(machine: str, network: str, remedy: str = "") -> str:
    """The warning about several machines with a fast network that the cluster does not set up."""
    return (
        f"{machine} has {network}, which this cluster does not set up{remedy}: between machines, NCCL will use TCP "
        "over one network card, and results are labeled slow_network."
    )


def make_version_error(cloud: str, wanted: str, place: str, offered: Iterable[str]) -> UsageError:
    """The error for a --kubernetes-version that the cloud does not offer."""
    return UsageError(
        f"{cloud} does not offer Kubernetes {wanted} {place}.",
        hint=f"It has {', '.join(offered)}; or remove --kubernetes-version",
    )
