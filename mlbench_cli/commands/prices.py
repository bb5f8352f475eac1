"""`mlbench prices`: which prices plans use, and how old they are; `mlbench prices update` asks the clouds."""

from typing import Annotated

import typer

from mlbench_cli import console
from mlbench_cli.commands._common import Format, Output
from mlbench_cli.errors import UsageError
from providers import pricing, registry

Providers = Annotated[list[str] | None, typer.Argument(metavar="[PROVIDER]...", help="gke, eks, aks; default: all")]

prices = typer.Typer(rich_markup_mode=None, add_completion=False)


@prices.callback(invoke_without_command=True)
def show(
    context: typer.Context,
    archive: Annotated[
        bool, typer.Option("--archive", help="show the prices behind the published results of the original MLBench")
    ] = False,
    output: Output = Format.text,
) -> None:
    """Show the price tables: source, date, and the number of prices per region."""
    if context.invoked_subcommand is not None:
        return
    if archive:
        _show_archive(output)
        return
    tables = {name: pricing.load_prices(name) for name in registry.PAID}
    if output == Format.json:
        console.out_json({name: {"source": table.source, **table.to_dict()} for name, table in tables.items()})
        return
    rows = [
        [name, region, table.count_prices(region), _show_ages(table.find_ages(region))]
        for name, table in tables.items()
        for region in table.list_regions()
    ]
    console.out_table(["PROVIDER", "REGION", "PRICES", "AGE IN DAYS"], rows)
    old = [
        name
        for name, table in tables.items()
        if any(age > pricing.OLD_DAYS for region in table.list_regions() for age in table.find_ages(region))
    ]
    if old:
        console.note(
            f"Some prices are older than {pricing.OLD_DAYS} days. To update: mlbench prices update {' '.join(old)}"
        )
    for name, table in tables.items():
        console.note(f"{name}: {table.source}")


def _show_archive(output: Format) -> None:
    found = pricing.load_archive()
    if output == Format.json:
        console.out_json({"currency": "USD", "prices": [vars(item) for item in found]})
        return
    rows = [[item.table, item.item, _amount(item.on_demand), _amount(item.spot), item.source] for item in found]
    console.out_table(["TABLE", "ITEM", "ON DEMAND USD/H", "SPOT USD/H", "SOURCE"], rows)


def _show_ages(ages: list[int]) -> str:
    """The newest and the oldest."""
    if not ages:
        return "unknown"
    return str(ages[0]) if len(set(ages)) == 1 else f"{min(ages)} to {max(ages)}"


def _amount(price: float | None) -> str:
    return "unknown" if price is None else f"{price:.4f}"


@prices.command()
def update(
    providers: Providers = None,
    region: Annotated[
        list[str] | None, typer.Option("--region", help="region to update; repeatable; default: regions in use")
    ] = None,
    output: Output = Format.text,
) -> None:
    """Ask the clouds for today's prices and keep them, dated, for the plans of this machine.

    Google needs a signed-in account. AWS and Azure publish their prices: with an account on AWS (pricing:GetProducts)
    only a few are asked for, without one the price list file of each region is read, some hundred megabytes.
    """
    names = [registry.ALIASES.get(name, name) for name in providers or registry.PAID]
    for name in names:
        if name not in registry.PAID:
            raise UsageError(f'"{name}" has no prices.', hint=f"mlbench prices update {' '.join(registry.PAID)}")
    updated = [pricing.update_prices(name, tuple(region or ())) for name in names]
    if output == Format.json:
        console.out_json({item.provider: {"source": item.source, "prices": item.count} for item in updated})
        return
    for item in updated:
        console.out(f"{item.provider}: {item.count} prices of {', '.join(item.regions) or 'no region'} ({item.source})")
