"""Calibrated runs as `mlbench predict` and `mlbench plan` read them."""

from pathlib import Path

from mlbench_cli import console
from mlbench_cli.commands._common import results_of
from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.results.archive.verify import open_verified
from mlbench_cli.simulator.calibration import FILE, HOW, Calibration, find_link, parse_calibration, read_probe
from mlbench_cli.simulator.gloo import Link
from mlbench_cli.storage.store import Store
from task_images.comm.methods import Method, MethodError
from task_images.comm.presets import PRESETS, resolve

MAX_DOCUMENT_BYTES = 64 << 20


def own_method(archive: Archive) -> Method:
    """The run's method; without one the task's own: a message after the backward pass, or torch's DDP."""
    given = archive.run["spec"].get("method")
    try:
        if isinstance(given, dict) and given:
            return Method.from_dict(given)
        if isinstance(given, str) and given in PRESETS:
            return resolve(given)
    except MethodError:
        pass
    return resolve("ddp" if str(archive.run["spec"]["task"]).endswith("_ddp") else "bsp")


def open_run(name: str, unproven: bool) -> Archive:
    """The verified archive of a run, or at a path."""
    path = Path(name)
    if not path.exists():
        path = results_of(Store(notice=console.note).run(name).run)
    return open_verified(path, unproven=unproven)


def read_calibration(archive: Archive, *, required: bool) -> tuple[Calibration, Link, float]:
    """A run's calibration, its link, and the model's error on its own collectives."""
    if FILE not in archive.names:
        raise NotFoundError(f'The run "{archive.run["name"]}" was not calibrated: it has no {FILE}.', hint=HOW)
    calibration = parse_calibration(archive.read(FILE, MAX_DOCUMENT_BYTES))
    try:
        return (calibration, *find_link(calibration, archive.result.get("network")))
    except UsageError:
        if required:
            raise
        return calibration, Link(0.0, 0.0), 0.0


def read_run_probe(name: str, unproven: bool) -> Link:
    """The link that a run's probe of its network found. Raises NotFoundError if it had no network of its own."""
    with open_run(name, unproven) as archive:
        link = read_probe(archive.result.get("network"))
        if link is None:
            raise NotFoundError(
                f'The run "{archive.run["name"]}" has probed no network between machines.',
                hint="Take a run with several workers on machines, or on a shaped network, of their own.",
            )
        return link
