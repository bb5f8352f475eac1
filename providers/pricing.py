"""Prices of machines: the user's prices.toml takes precedence over the one next to this file. Unknown prices are None,
not 0.
"""

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Self

from mlbench_cli.config import settings
from mlbench_cli.errors import UsageError
from mlbench_cli.util.files import write_atomically
from providers.base import PlanLine

SHIPPED = Path(__file__).with_name("prices.toml")
ANY_REGION = "any"
OLD_DAYS = 90  # from which on a plan says that prices are old
# Regions whose prices `mlbench prices update` asks for by default.
DEFAULT_REGIONS = {
    "gke": ("us-central1", "europe-west1", "europe-west4"),
    "eks": ("us-east-1", "us-west-2", "eu-west-1"),
    "aks": ("eastus", "westus3", "westeurope"),
}


@dataclass(frozen=True)
class FetchedPrices:
    """Prices as a cloud has them now, per region and item, in USD per hour."""

    provider: str
    source: str
    on_demand: Mapping[str, Mapping[str, float]]
    spot: Mapping[str, Mapping[str, float]]

    @property
    def count(self) -> int:
        """How many prices there are over all regions, spot included."""
        return sum(len(items) for table in (self.on_demand, self.spot) for items in table.values())

    @property
    def regions(self) -> list[str]:
        """The regions with any price, sorted."""
        return sorted({*self.on_demand, *self.spot})


@dataclass(frozen=True)
class PriceTable:
    """One provider's prices, per piece and hour. `source` names origin and date, `version` the content."""

    currency: str
    source: str
    version: str
    layers: tuple[Mapping[str, Any], ...]  # the person's own first

    def price(self, item: str, region: str, *, spot: bool = False) -> float | None:
        """The price of a machine type or another part. A spot price is never derived from the on-demand price."""
        found = self._find_price(item, region, spot)
        return None if found is None else found[0]

    def line(self, what: str, count: int, item: str, region: str, *, spot: bool = False) -> PlanLine:
        """A part of a plan, with its price if it is known."""
        amount, as_of = self._find_price(item, region, spot) or (None, None)
        return PlanLine(what, count, amount, as_of)

    def _find_price(self, item: str, region: str, spot: bool) -> tuple[float, str | None] | None:
        kind = "spot" if spot else "on-demand"
        for layer in self.layers:
            for place in (region, ANY_REGION):
                amount = layer.get(kind, {}).get(place, {}).get(item)
                if amount is not None:
                    as_of = layer.get("as-of", {}).get(item, layer.get("date"))
                    return float(amount), None if as_of is None else str(as_of)
        return None

    def ask_missing(
        self, items: Sequence[tuple[str, bool]], region: str, ask: Callable[[str, bool], float | None]
    ) -> Self:
        """The table with what `ask` knows of the items (machine, whether as spot) without a price in the region."""
        today = f"{datetime.now(UTC):%Y-%m-%d}"
        layer: dict[str, Any] = {"date": today}
        for item, spot in items:
            if self._find_price(item, region, spot) is None and (amount := ask(item, spot)) is not None:
                layer.setdefault("spot" if spot else "on-demand", {}).setdefault(region, {})[item] = amount
        return self if len(layer) == 1 else replace(self, layers=(*self.layers, layer))

    def list_regions(self) -> list[str]:
        """The regions with prices."""
        found = {place for layer in self.layers for place in layer.get("on-demand", {})}
        return sorted(found - {ANY_REGION})

    def find_ages(self, region: str) -> list[int]:
        """Ages of the region's prices in days; those without a date are left out."""
        items = {item for layer in self.layers for item in _entries(layer, region)}
        dates = [found[1] for item in items if (found := self._find_price(item, region, False)) is not None]
        return [age for text in dates if (age := age_in_days(text)) is not None]

    def to_dict(self) -> dict[str, object]:
        """Currency, version, and the number of prices per region."""
        regions = {region: self.count_prices(region) for region in self.list_regions()}
        return {"currency": self.currency, "table": self.version, "regions": regions}

    def count_prices(self, region: str) -> int:
        """The number of parts with a known on-demand price in the region."""
        return len({item for layer in self.layers for place in (region, ANY_REGION) for item in _entries(layer, place)})


def age_in_days(text: str | None, today: date | None = None) -> int | None:
    """The age of a price dated "2026-07-30", or "2025", which counts from its first day; None without a date."""
    words = re.fullmatch(r"(\d{4})(?:-(\d\d)-(\d\d))?", text or "")
    if words is None:
        return None
    try:
        then = date(int(words[1]), int(words[2] or 1), int(words[3] or 1))
    except ValueError:
        return None
    return max(0, ((today or datetime.now(UTC).date()) - then).days)


def _entries(layer: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    entries: Mapping[str, Any] = layer.get("on-demand", {}).get(place, {})
    return entries


@dataclass(frozen=True)
class ArchivedPrice:
    """One price that the original's published results used, in USD per hour; None if it was not published."""

    table: str
    item: str
    on_demand: float | None
    spot: float | None
    source: str


def load_archive() -> list[ArchivedPrice]:
    """The prices of the original's published results, by table and item. No plan uses them."""
    found = []
    for name, table in _read(SHIPPED)["archive"].items():
        on_demand, spot = table["on-demand"], table["spot"]
        for item in dict.fromkeys([*on_demand, *spot]):
            found.append(ArchivedPrice(name, item, on_demand.get(item), spot.get(item), table["source"]))
    return found


def user_price_file() -> Path:
    """The user's own prices.toml, which goes before all other tables."""
    return settings.config_dir() / "prices.toml"


def fetched_price_file(provider: str) -> Path:
    """The file that `mlbench prices update` writes for a provider."""
    return settings.config_dir() / f"prices-{provider}.toml"


def update_prices(provider: str, regions: Sequence[str]) -> FetchedPrices:
    """Ask the cloud for prices and keep them. Raises UsageError if it has none; the old ones stay then."""
    from importlib import import_module

    module = import_module(f"providers.{provider}.prices")
    fetched: FetchedPrices = module.fetch_prices(tuple(regions) or DEFAULT_REGIONS[provider])
    if not fetched.count:
        raise UsageError(
            f"{fetched.source} has no prices of {provider} for {', '.join(regions) or 'these regions'}.",
            hint="Check the region name.",
        )
    path = fetched_price_file(provider)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, _format_table(fetched).encode())
    return fetched


def _format_table(fetched: FetchedPrices) -> str:
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    lines = [f"[{fetched.provider}]", 'currency = "USD"', f'date = "{today}"', f'source = "{fetched.source}"']
    for kind, regions in (("on-demand", fetched.on_demand), ("spot", fetched.spot)):
        for region, items in sorted(regions.items()):
            lines += ["", f'[{fetched.provider}.{kind}."{region}"]']
            lines += [f'"{item}" = {amount!r}' for item, amount in sorted(items.items())]
    return "\n".join(lines) + "\n"


def load_prices(provider: str) -> PriceTable:
    """The prices of one provider: the person's own, those fetched, the shipped. Raises UsageError if malformed."""
    shipped = _read(SHIPPED)[provider]
    version = f"{shipped['date']} {_digest(shipped)}"
    source = f"{shipped['source']} (table of {shipped['date']})"
    layers: tuple[Mapping[str, Any], ...] = (shipped,)
    if fetched_price_file(provider).exists():
        fetched = _read(fetched_price_file(provider)).get(provider, {})
        _check(fetched, provider)
        version = f"{fetched.get('date')} {_digest(fetched)}, then {version}"
        source = f"{fetched.get('source')} ({fetched.get('date')}), then {source}"
        layers = (fetched, shipped)
    if not user_price_file().exists():
        origin = f"{source}; your own prices take precedence: {user_price_file()}"
        return PriceTable(shipped["currency"], origin, version, layers)
    own = _read(user_price_file()).get(provider, {})
    _check(own, provider)
    if own.get("currency", shipped["currency"]) != shipped["currency"]:
        raise UsageError(f"{user_price_file()}: prices of {provider} must be in {shipped['currency']}.")
    date = own.get("date", "without a date")
    version = f"{date} {_digest(own)}, then {version}"
    return PriceTable(shipped["currency"], f"{user_price_file()} ({date}), then {source}", version, (own, *layers))


def _digest(layer: Mapping[str, Any]) -> str:
    """Eight hex digits that identify a table by its content."""
    import hashlib
    import json

    return hashlib.sha256(json.dumps(layer, sort_keys=True, default=str).encode()).hexdigest()[:8]


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(
            f"The price table {path} cannot be read: {error}.", hint=f"Compare it with {SHIPPED}"
        ) from None


def _check(own: Any, provider: str) -> None:
    places = [own.get(kind, {}) for kind in ("on-demand", "spot")] if isinstance(own, dict) else [None]
    for regions in places:
        items = regions.values() if isinstance(regions, dict) else [None]
        for entries in items:
            if not isinstance(entries, dict) or not all(_is_price(amount) for amount in entries.values()):
                raise UsageError(
                    f"{user_price_file()}: [{provider}.on-demand.REGION] and [{provider}.spot.REGION] hold prices, "
                    'e.g. "g5.xlarge" = 1.006.',
                    hint=f"Compare it with {SHIPPED}",
                )


def _is_price(amount: Any) -> bool:
    return isinstance(amount, int | float) and not isinstance(amount, bool) and 0 <= amount < 1e6
