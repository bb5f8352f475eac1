"""The REST API of MLBench 3's dashboard, so that its client and scripts continue to work.

Requests and responses were recorded with that client. Differences: errors have a status with a message instead of 304
or 500, paths with and without a trailing slash work without a redirect, and `since` accepts both spellings.
"""

import json
import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, TypedDict
from urllib.parse import parse_qsl

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from mlbench_cli.api import RunHandle
from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.model.run import JsonObject, Outcome, RunState
from mlbench_cli.server.access import client_of, find_run, list_runs
from mlbench_cli.server.config import ServerConfig
from mlbench_cli.storage.run_folder import STATE_FOLDER, RunFolder
from mlbench_cli.util.times import timestamp

MAX_RUNS = 100  # whose metrics are included in "all metrics"
_AGG = "global_cum_agg @ 0"
_POSTED = "posted.jsonl"
_LIMITS = {"name": 50, "value": 255}
_FINISHED = (Outcome.GOAL_REACHED, Outcome.GOAL_MISSED, Outcome.BUDGET_SPENT, Outcome.COMPLETED)
# Images of MLBench 3 -> tasks of mlbench.
TASKS = {
    "pytorch-cifar10-resnet20-all-reduce": "cifar10_resnet20",
    "pytorch-cifar10-resnet20-ddp": "cifar10_resnet20_ddp",
    "pytorch-epsilon-logistic-regression-all-reduce": "epsilon_logistic_regression",
    "pytorch-wikitext2-lstm-all-reduce": "wikitext2_awd_lstm",
    "pytorch-wmt16-gnmt-all-reduce": "wmt16_gnmt",
    "pytorch-wmt17-transformer-all-reduce": "wmt17_transformer",
    "tensorflow-cifar10-resnet": "cifar10_resnet20_tensorflow",
    "pytorch-backend-benchmark": "allreduce",
}


class OriginalSample(TypedDict):
    """A value of a metric, as a string."""

    date: str
    value: str
    cumulative: bool


Samples = dict[str, list[OriginalSample]]


def make_routes(config: ServerConfig) -> list[BaseRoute]:
    """Every path with and without its trailing slash."""
    api = _Original(config)
    table = (
        ("/api/pods", api.pods, ["GET"]),
        ("/api/runs", api.runs, ["GET"]),
        ("/api/runs", api.create, ["POST"]),
        ("/api/runs/{id}", api.run, ["GET"]),
        ("/api/runs/{id}", api.delete, ["DELETE"]),
        ("/api/metrics", api.all_metrics, ["GET"]),
        ("/api/metrics", api.post_metric, ["POST"]),
        ("/api/metrics/{id}", api.metrics, ["GET"]),
    )
    return [Route(path + end, handler, methods=methods) for path, handler, methods in table for end in ("", "/")]


class _Original:
    def __init__(self, config: ServerConfig) -> None:
        self._config = config

    def pods(self, request: Request) -> Response:
        return JSONResponse(list_pods(self._config))

    def runs(self, request: Request) -> Response:
        return JSONResponse([describe_run(handle) for handle in reversed(list_runs(self._config))])

    def run(self, request: Request) -> Response:
        handle = find_by_number(self._config, request.path_params["id"])
        return JSONResponse({**describe_run(handle), "job_metadata": _job_metadata(handle)})

    async def create(self, request: Request) -> Response:
        form = dict(parse_form(await request.body()))
        return JSONResponse(await run_in_threadpool(self._start, form), 201)

    def _start(self, form: Mapping[str, str]) -> JsonObject:
        from mlbench_cli.runs.request import parse_file

        request = parse_file(json.dumps(request_of_form(form)))
        experiment = client_of(self._config).submit(request, command_line=("mlbench", "serve"))
        return describe_run(experiment.runs()[0])

    def delete(self, request: Request) -> Response:
        find_by_number(self._config, request.path_params["id"]).delete(force=True)
        return Response(status_code=204)

    def metrics(self, request: Request) -> Response:
        name, query = request.path_params["id"], request.query_params
        kind = query.get("metric_type", "pod")
        if kind not in ("pod", "run"):
            raise UsageError(f'metric_type "{kind[:40]}" is neither pod nor run.')
        is_run = kind == "run"
        series = run_series(find_by_number(self._config, name)) if is_run else pod_series(self._config, name)
        samples = select_samples(
            series,
            since=query.get("since"),
            summarize=_count(query.get("summarize"), "summarize"),
            name=query.get("metric_filter"),
            last=_count(query.get("last_n"), "last_n"),
        )
        return JSONResponse(samples)

    def all_metrics(self, request: Request) -> Response:
        """The metrics of the newest runs only, to limit the response."""
        runs: JsonObject = {}
        pods: JsonObject = {}
        for handle in list_runs(self._config, limit=MAX_RUNS):
            runs[handle.name] = {name: _whole(name, found) for name, found in run_series(handle).items()}
            for pod, series in _machines(handle).items():
                pods[pod] = {name: _whole(name, found) for name, found in series.items()}
        return JSONResponse({"pod_metrics": pods, "run_metrics": runs})

    async def post_metric(self, request: Request) -> Response:
        pairs = parse_form(await request.body())
        form = dict(pairs)
        number = form.get("run_id")
        if not number:
            raise UsageError("Run Id is missing.")
        fields = {key: form.get(key, "") for key in ("name", "value", "date")}
        metadata = ", ".join(value for key, value in pairs if key == "metadata")
        is_cumulative = form.get("cumulative", "False").lower() == "true"
        answer = await run_in_threadpool(self._keep, number, fields, metadata, is_cumulative)
        return JSONResponse(answer, 201)

    def _keep(self, number: str, fields: Mapping[str, str], metadata: str, is_cumulative: bool) -> JsonObject:
        """Store a metric posted by a client beside the archive, because it is not evidence."""
        for name, limit in _LIMITS.items():
            if not fields[name] or len(fields[name]) > limit:
                raise UsageError(f"{name} must have 1 to {limit} characters.")
        handle = find_by_number(self._config, number)
        moment = parse_since(fields["date"]) if fields["date"] else datetime.now(UTC).timestamp()
        sample: OriginalSample = {"date": timestamp(moment), "value": fields["value"], "cumulative": is_cumulative}
        with open(RunFolder(handle.folder).state / _POSTED, "ab") as file:
            file.write((json.dumps({"name": fields["name"], **sample}) + "\n").encode())
        return {"name": fields["name"], **sample, "metadata": metadata}


def parse_form(body: bytes) -> list[tuple[str, str]]:
    """The fields of a URL-encoded form, in order. Raises UsageError."""
    try:
        return parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=100)
    except (UnicodeDecodeError, ValueError):
        raise UsageError("The request body is not a form.") from None


# --- runs and pods --------------------------------------------------------------------------------------------------


def number_of(run_id: str) -> int:
    """A stable integer ID for a run, as in MLBench 3."""
    try:
        return int(run_id, 16)
    except ValueError:
        import zlib

        return zlib.crc32(run_id.encode())


def find_by_number(config: ServerConfig, number: str) -> RunHandle:
    """The run with that number. Raises NotFoundError."""
    if number.isascii() and number.isdecimal() and len(number) < 20:
        try:
            return find_run(config, f"{int(number):012x}")
        except NotFoundError:
            wanted = int(number)
            for handle in list_runs(config):
                if number_of(handle.run.id) == wanted:
                    return handle
    raise NotFoundError(f'There is no run "{number[:40]}".')


def describe_run(handle: RunHandle) -> JsonObject:
    """A run in the format of MLBench 3's list."""
    outcome, result = handle.outcome, RunFolder(handle.folder).read_json("result.json")
    return {
        "id": number_of(handle.run.id),
        "name": handle.name,
        "created_at": handle.run.created,
        "finished_at": result.get("finished") if result and outcome else None,
        "state": state_of(handle, outcome),
        "job_id": "",
        "job_metadata": {},
        "num_workers": handle.run.spec.workers,
    }


def state_of(handle: RunHandle, outcome: Outcome | None) -> str:
    """initialized, started, failed or finished."""
    if outcome is not None:
        return "finished" if outcome in _FINISHED else "failed"
    return "started" if handle.row.state is RunState.RUNNING and handle.is_started else "initialized"


def _job_metadata(handle: RunHandle) -> JsonObject:
    lines = [entry.text.decode("utf-8", "replace") for entry in handle.logs(tail=1000)]
    pods = [f"{handle.name}-{index}" for index in range(handle.run.spec.workers)]
    command = " ".join(handle.run.spec.argv)
    return {
        "stdout": lines,
        "stderr": [],
        "pods": pods,
        "command": command,
        "master_name": pods[0],
        "workhorse_pid": None,
    }


def list_pods(config: ServerConfig) -> list[dict[str, str]]:
    """The workers of running runs; if there are none, of the newest run."""
    handles = [handle for handle in list_runs(config, states=("created", "running")) if handle.outcome is None]
    return [pod for handle in handles or list_runs(config, limit=1) for pod in _pods_of(handle)]


def _pods_of(handle: RunHandle) -> Iterable[dict[str, str]]:
    ranks = handle.status()["ranks"]
    for index, worker in enumerate(ranks):
        labels = {"app": "mlbench", "component": "worker", "run": handle.name}
        yield {
            "name": f"{handle.name}-{index}",
            "labels": repr(labels),  # a Python literal, as in MLBench 3
            "phase": str(worker["phase"]).capitalize(),
            "ip": "127.0.0.1" if handle.run.spec.engine == "local" else str(worker.get("node") or ""),
        }


def request_of_form(form: Mapping[str, str]) -> JsonObject:
    """The form of MLBench 3 as the mapping of a spec file. Raises UsageError for missing or unknown fields."""
    name, workers = form.get("name", ""), form.get("num_workers", "")
    if not name or not workers.isdecimal():
        raise UsageError("A run needs name and num_workers.")
    request: JsonObject = {"name": name.removesuffix(f"-{workers}"), "workers": [int(workers)]}
    image = form.get("image_name", "")
    if image == "custom_image":
        request |= {"command": form.get("custom_image_command", "")}
        if form.get("custom_image_name"):
            request["image"] = form["custom_image_name"]
    else:
        short = image.rpartition("/")[2].partition(":")[0]
        if short not in TASKS:
            raise UsageError(f'The image "{image[:80]}" is not one of the original\'s.', hint=", ".join(TASKS))
        request["task"] = TASKS[short]
    backend = form.get("custom_backend") if form.get("backend") == "custom_backend" else form.get("backend")
    if backend:
        is_custom = form.get("backend") == "custom_backend"
        request["backend"] = f"custom:{backend}" if is_custom else backend.lower()
    if form.get("gpu_enabled") == "true":
        request["gpu"] = True
    if form.get("light_target") == "true":
        request["light"] = True
    if image == "custom_image" and form.get("run_all_nodes") in ("true", "false"):
        request["run-on-all"] = form["run_all_nodes"] == "true"
    return request


# --- series ---------------------------------------------------------------------------------------------------------


def run_series(handle: RunHandle) -> Samples:
    """A run's metrics by MLBench 3's names, "<metric> @ <rank>", in order of time."""
    from mlbench_cli.results.archive.mlbench_v3 import task_series

    if handle.is_sealed:
        with handle.archive(verify=False) as archive:
            found: Samples = {
                name.removeprefix("result_"): [_sample(each) for each in samples]
                for name, samples in task_series(archive).items()
            }
            if _AGG not in found and "global_cum_fwd_pass @ 0" in found:
                found[_AGG] = [{"date": archive.result["finished"], "value": "0.0", "cumulative": False}]
    else:
        found = _live_series(handle)
    for name, sample in _posted(handle):
        found.setdefault(name, []).append(sample)
    return {name: sorted(samples, key=lambda each: each["date"]) for name, samples in found.items()}


def _live_series(handle: RunHandle) -> Samples:
    from mlbench_cli.results.archive.mlbench_v3 import original_names

    goal = handle.goal
    found: Samples = {}
    for point in handle.metrics():
        row = {"name": point.name, "rank": point.rank}
        for name in original_names(row, goal.metric if goal else None):
            sample: OriginalSample = {"date": timestamp(point.time), "value": str(point.value), "cumulative": False}
            found.setdefault(f"{name} @ {point.rank}", []).append(sample)
    return found


def pod_series(config: ServerConfig, pod: str) -> Samples:
    """The resource usage of a worker's machine: cpu, memory, network. Raises NotFoundError for an unknown worker."""
    handle = find_run(config, pod.rpartition("-")[0])
    series = _machines(handle)
    if pod not in series and not any(pod == f"{handle.name}-{index}" for index in range(handle.run.spec.world_size)):
        raise NotFoundError(f'There is no pod "{pod[:60]}".')
    return series.get(pod, {})


def _machines(handle: RunHandle) -> dict[str, Samples]:
    """Resource usage by pod and metric, only of runs with a complete archive."""
    from mlbench_cli.results.archive.mlbench_v3 import machine_series

    if not handle.is_sealed:
        return {}
    found: dict[str, Samples] = {}
    with handle.archive(verify=False) as archive:
        for name, samples in machine_series(archive).items():
            pod, _, metric = name.partition("_")
            found.setdefault(pod, {})[metric] = [_sample(each) for each in samples]
    return found


def _posted(handle: RunHandle) -> Iterable[tuple[str, OriginalSample]]:
    try:
        lines = (handle.folder / STATE_FOLDER / _POSTED).read_bytes().splitlines()
    except OSError:
        return
    for line in lines:
        row = json.loads(line)
        yield row.pop("name"), _sample(row)


def select_samples(series: Samples, *, since: str | None, summarize: int, name: str | None, last: int) -> Samples:
    """Filter, since, summarize, last: the order of MLBench 3. Names without samples are left out."""
    begin = None if not since else timestamp(parse_since(since))
    found: Samples = {}
    for key, samples in series.items():
        if name is not None and key != name:
            continue
        kept = [sample for sample in samples if begin is None or sample["date"] >= begin]
        kept = _summarize(kept, summarize) if summarize else kept
        kept = kept[-last:] if last else kept
        if kept:
            found[key] = kept
    return found


def parse_since(text: str) -> float:
    """Seconds since 1970 of "2026-11-22T00:00:00.000000Z" or, as MLBench 3's client sends it, "2026-11-22 00:00:00".

    Without a zone it is UTC. Raises UsageError.
    """
    try:
        moment = datetime.fromisoformat(text.replace("Z", "+00:00") if text.endswith("Z") else text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise UsageError(f'"{text[:60]}" is not a time.', hint="2026-01-31T10:00:00.000Z") from None


def _summarize(samples: list[OriginalSample], count: int) -> list[OriginalSample]:
    """Means of groups of equal size with the time of their first sample; an incomplete last group is dropped, as in
    MLBench 3."""
    if len(samples) <= count:
        return samples
    size = math.ceil(len(samples) / count)
    groups = [samples[start : start + size] for start in range(0, len(samples) - size + 1, size)]
    return [{**group[0], "value": str(_mean(group))} for group in groups]


def _mean(group: list[OriginalSample]) -> float:
    try:
        return math.fsum(float(sample["value"]) for sample in group) / len(group)
    except ValueError:
        return math.nan  # strings have no mean


def _count(text: str | None, name: str) -> int:
    if text is None or text == "":
        return 0
    if not (text.isascii() and text.isdecimal()) or len(text) > 9:
        raise UsageError(f'{name} "{text[:40]}" is not a whole number of at least 0.')
    return int(text)


def _sample(row: Mapping[str, Any]) -> OriginalSample:
    return {"date": str(row["date"]), "value": str(row["value"]), "cumulative": bool(row["cumulative"])}


def _whole(name: str, samples: Iterable[OriginalSample]) -> list[JsonObject]:
    """Samples with all five fields, as in "all metrics"."""
    rank = name.rpartition(" @ ")[2]
    metadata = f"{{rank: {rank}}}" if rank.isdecimal() else ""
    return [{"name": name, **sample, "metadata": metadata} for sample in samples]
