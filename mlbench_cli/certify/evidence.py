"""The certificate of a run of the task certify, from its evidence."""

from collections.abc import Callable, Mapping
from typing import BinaryIO

from mlbench_cli.certify.expectations import parse_expected
from mlbench_cli.certify.judge import Document, judge
from mlbench_cli.certify.samples import read_samples
from mlbench_cli.model.run import Observation
from mlbench_cli.model.spec import RunSpec
from task_images.certify.evidence import Evidence, read_earlier
from task_images.certify.rules import LEAST_DIP

TASK = "certify"


def certify(spec: RunSpec, observation: Observation, logs: Mapping[int, Callable[[], BinaryIO]]) -> Document | None:
    """certificate.json; None for a run of another task."""
    if spec.task != TASK:
        return None
    workers = {spec.unit_of(worker.rank): worker for worker in observation.workers}
    places = [None if number not in workers else workers[number].node for number in range(spec.workers)]
    are_nodes = None not in places and len(set(places)) == len(places)
    names = [str(place) if are_nodes else f"worker-{number}" for number, place in enumerate(places)]
    started = [number in workers and workers[number].started is not None for number in range(spec.workers)]
    dip = spec.parameters.get("least_dip_seconds")
    least_dip = float(dip) if isinstance(dip, int | float) else LEAST_DIP
    earlier = read_earlier(str(spec.parameters.get("recheck") or ""))
    evidence = Evidence(spec.processes_per_worker, least_dip, earlier, names)
    samples = read_samples(logs, spec.world_size, evidence)
    return judge(samples, names, started, parse_expected(str(spec.parameters.get("expect") or "")))
