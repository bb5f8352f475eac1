"""Experiment files: spec files (`mlbench run -f`) with more keys, which describe several kinds of runs.

    title        headline of table and figures
    runs         list of spec files' mappings; each inherits the keys at the top of the file, and overrides them
    clusters     names of clusters; everything runs on each of them
    metric       what is compared: the name of a reported metric; default: throughput, else seconds
    published    series of others to put beside (results/analysis/rates.py)

A file is one experiment: an entry of `runs` is the key "runs" of its members' points, a cluster the key "cluster".
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from mlbench_cli.errors import NotFoundError, UsageError, did_you_mean
from mlbench_cli.model.run import Cluster, JsonObject
from mlbench_cli.runs.experiment import ENTRY, Candidate, absolute_paths, expand, refuse_duplicates
from mlbench_cli.runs.launch import Machine
from mlbench_cli.runs.matrix import MAX_MEMBERS, hint_for
from mlbench_cli.runs.request import Request, merge, parse_mapping, request_document
from mlbench_cli.tasks.catalog import short
from mlbench_cli.util.yaml_text import read_yaml

FOLDER = Path(__file__).parents[1] / "experiments"
_OWN_KEYS = ("title", "runs", "clusters", "metric", "published")


class ExperimentFile(Struct, frozen=True):
    """`common`: the keys at the top. `own`: the keys of each entry of `runs`; `entries`: its name, which is empty for a
    single one without a name, and its complete request. Times in hours, costs in the currency of the prices."""

    name: str
    title: str
    common: Request
    own: tuple[Request, ...]
    entries: tuple[tuple[str, Request], ...]
    clusters: tuple[str, ...] = ()
    metric: str | None = None
    published: tuple[str, ...] = ()

    def to_document(self) -> JsonObject:
        """The mapping of a file that says the same, with absolute paths: what is recorded of the experiment."""
        keys: JsonObject = {"title": self.title, "clusters": list(self.clusters), "metric": self.metric}
        keys["published"] = list(self.published)
        common = request_document(absolute_paths(replace(self.common, name=self.name)))
        runs = [request_document(absolute_paths(own)) for own in self.own]
        return {**common, **{key: value for key, value in keys.items() if value}, "runs": runs}


# --- reading --------------------------------------------------------------------------------------------------------


def list_shipped() -> list[str]:
    """Names of the experiment files that come with mlbench."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def describes_several(text: str) -> bool:
    """Whether `text` names a file with `runs`, or one that is shipped; False for a file that cannot be read."""
    path = Path(text)
    if not path.is_file():
        return text in list_shipped()
    try:
        data = read_yaml(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, UsageError):
        return False
    return isinstance(data, dict) and "runs" in data


def find_file(text: str) -> Path:
    """The experiment file of that path, or the shipped one of that name. Raises NotFoundError."""
    path = Path(text)
    if path.is_file():
        return path
    shipped = FOLDER / f"{text}.yaml"
    if text in list_shipped():
        return shipped
    raise NotFoundError(
        f"There is no file {text}.{did_you_mean(text, list_shipped())}",
        hint=f"Give a path, or one of the files that come with mlbench: {', '.join(list_shipped())}",
    )


def read_experiment_file(path: Path) -> ExperimentFile:
    """Raises UsageError that names file and key."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"The file {path} cannot be read: {error}.") from None
    try:
        return parse_experiment_file(read_yaml(text), path.stem)
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}", hint=error.hint, details=error.details) from None


def parse_experiment_file(data: object, default_name: str) -> ExperimentFile:
    """The experiment file in what its YAML says. Raises UsageError that names the key."""
    if not isinstance(data, dict):
        raise UsageError("The file is not a mapping.")
    keys = {str(key).replace("_", "-"): value for key, value in data.items()}
    own = {key: value for key, value in keys.items() if key in _OWN_KEYS}
    common = parse_mapping({key: value for key, value in data.items() if str(key).replace("_", "-") not in own})
    name = common.name or default_name
    entries = own.get("runs", [{}])
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise UsageError(f'"runs" is {short(entries)}, not a list of mappings of options to values.')
    requests = tuple(_parse_entry(number, entry) for number, entry in enumerate(entries, 1))
    found = tuple(
        _complete(request.name or (f"{number}" if len(requests) > 1 else ""), request, common, name)
        for number, request in enumerate(requests, 1)
    )
    if len({entry for entry, _ in found}) < len(found):
        raise UsageError("Two entries of runs have the same name.", hint='Give each its own "name".')
    title = own.get("title", name)
    metric = own.get("metric")
    if not isinstance(title, str) or not isinstance(metric, str | None):
        raise UsageError('"title" and "metric" must be texts.')
    return ExperimentFile(
        name=name,
        title=title,
        common=common,
        own=requests,
        entries=found,
        clusters=_texts(own, "clusters"),
        metric=metric,
        published=_texts(own, "published"),
    )


def _parse_entry(number: int, entry: Mapping[Any, Any]) -> Request:
    try:
        return parse_mapping(entry)
    except UsageError as error:
        raise UsageError(f"Entry {number} of runs: {error.message}", hint=error.hint) from None


def _complete(suffix: str, own: Request, common: Request, name: str) -> tuple[str, Request]:
    request = merge(replace(common, name=None), own)
    if request.cluster is not None or "cluster" in request.matrix:
        raise UsageError('Name the clusters once, at the top of the file: "clusters: [NAME, NAME]".')
    return suffix, replace(request, name=f"{name}-{suffix}" if suffix else name)


def _texts(own: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = own.get(key, [])
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise UsageError(f'"{key}" is {short(value)}, not a list of strings.')
    return tuple(value)


# --- from a file to its runs ----------------------------------------------------------------------------------------


def expand_file(
    file: ExperimentFile,
    clusters: Sequence[Cluster],
    machine: Machine | None = None,
    with_defaults: Callable[[Request, Cluster], Request] | None = None,
    most: int = MAX_MEMBERS,
) -> tuple[Candidate, ...]:
    """The runs of a file on `clusters`, in an order in which slow drift of a machine affects all settings equally: the
    first repeat of everything, then the second; within a repeat one run of each entry and cluster in turn.

    Raises UsageError for runs that cannot work, and for more than `most` of them.
    """
    blocks: list[list[Sequence[Candidate]]] = []  # by repeat, then by entry and cluster
    count = 0
    for entry, request in file.entries:
        for cluster in clusters:
            own = request if cluster.provider == "local" else replace(request, cluster=cluster.name)
            marks = {ENTRY: entry} if entry else {}
            if len(clusters) > 1:
                own, marks["cluster"] = replace(own, name=f"{request.name}-{cluster.name}"), cluster.name
            if with_defaults is not None:
                own = with_defaults(own, cluster)
            found = expand(own, cluster, machine, marks=marks, most=most)
            count += len(found)
            size = len(found) // (own.repeat or 1)
            for repeat in range(own.repeat or 1):
                if repeat == len(blocks):
                    blocks.append([])
                blocks[repeat].append(found[repeat * size : (repeat + 1) * size])
    if count > most:
        raise UsageError(f"The file has {count} runs, more than {most}.", hint=hint_for(count))
    candidates = tuple(
        block[at]
        for of_repeat in blocks
        for at in range(max(map(len, of_repeat)))
        for block in of_repeat
        if at < len(block)
    )
    refuse_duplicates(candidates)
    return candidates
