"""Prices of machines: the user's prices.toml takes precedence over the one next to this file. Unknown prices are None,
not 0.
"""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from mlbench_cli.config import settings
from mlbench_cli.errors import UsageError
from providers.base import PlanLine

SHIPPED = Path(__file__).with_name("prices.toml")
ANY_REGION = "any"


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
        """A part of a plan, with its price if it is known. Of an unknown spot price, the one on demand is told."""
        amount, as_of = self._find_price(item, region, spot) or (None, None)
        if spot and amount is None and (whole := self.price(item, region)) is not None:
            what += f", on demand {whole:g} {self.currency}"
        return PlanLine(what, count, amount, as_of)

    def _find_price(self, item: str, region: str, spot: bool) -> tuple[float, str | None] | None:
        kind = "spot" if spot else "on-demand"
        for layer in self.layers:
            for place in (region, ANY_REGION):
                amount = layer.get(kind, {}).get(place, {}).get(item)
                if amount is not None:
                    as_of = layer.get("as-of-spot" if spot else "as-of", {}).get(item, layer.get("date"))
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

    def count_prices(self, region: str) -> int:
        """The number of parts with a known on-demand price in the region."""
        return len({item for layer in self.layers for place in (region, ANY_REGION) for item in _entries(layer, place)})


def _entries(layer: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    entries: Mapping[str, Any] = layer.get("on-demand", {}).get(place, {})
    return entries


def user_price_file() -> Path:
    """The user's own prices.toml, which goes before all other tables."""
    return settings.config_dir() / "prices.toml"


def load_prices(provider: str) -> PriceTable:
    """The prices of one provider: the person's own, then the shipped. Raises UsageError if malformed."""
    shipped = _read(SHIPPED)[provider]
    version = f"{shipped['date']} {_digest(shipped)}"
    source = f"{shipped['source']} (table of {shipped['date']})"
    layers: tuple[Mapping[str, Any], ...] = (shipped,)
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
