"""The documents of an archive: one type each, against which msgspec checks them, and from which it makes the schemas in
docs/schemas.

run.json, observation.json, shaping.json and faults.json are evidence; `judge` derives the others from it.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, NotRequired, TypedDict

import msgspec
from msgspec import Meta

from mlbench_cli.certify.words import REASONS, State, Verdict
from mlbench_cli.model.goals import COMPARISONS, KINDS
from mlbench_cli.model.run import Ending, FindingDocument, Outcome, Phase
from mlbench_cli.storage import run_folder
from mlbench_cli.util.json_text import SCHEMA_VERSION
from mlbench_cli.util.times import MAX_SECONDS

LABELS = ("crowded", "contended", "quota_limited", "shared", "slow_network", "preloaded")  # see conditions


def _one_of(words: Iterable[str]) -> Meta:
    pattern = "|".join(re.escape(word) for word in words)
    return Meta(pattern=f"^(?:{pattern})$", extra_json_schema={"enum": [str(word) for word in words]})


Count = Annotated[int, Meta(ge=0)]
Amount = Annotated[float, Meta(ge=0)]
ClockTime = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]  # seconds since 1970
Moment = Annotated[
    str,
    Meta(
        pattern=r"^[0-9]{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12][0-9]|3[01])"
        r"T(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?Z$",
        extra_json_schema={"format": "date-time"},
    ),
]


class RunDocument(TypedDict):
    """run.json: the request, its provenance, and the task's rules at that time."""

    id: str
    name: str
    created: Moment
    spec_hash: str
    spec: dict[str, Any]  # RunSpec.to_dict
    task: dict[str, Any] | None  # TaskRules.to_dict; None for a custom command or an unknown task
    mlbench: str
    provenance: dict[str, Any] | None
    repeats: NotRequired[Count]  # how many runs of this setting and size the command asked for


class FindingsDocument(TypedDict):
    """findings.json."""

    findings: list[FindingDocument]


class ObservedWorkerDocument(TypedDict):
    """A worker in observation.json, as WorkerState."""

    rank: Count
    phase: Annotated[str, _one_of(Phase)]
    reason: str | None
    node: str | None
    exit_code: int | None
    started: ClockTime | None
    finished: ClockTime | None
    restarts: NotRequired[Count]
    image_digest: NotRequired[str | None]
    seconds: NotRequired[Amount]


class ClockDocument(TypedDict):
    """A node's clock in observation.json, as NodeClock."""

    node: str | None
    stepped_seconds: Amount


class ObservationDocument(TypedDict):
    """observation.json: what the engine observed of the workers, at the end."""

    time: ClockTime
    workers: list[ObservedWorkerDocument]
    findings: list[FindingDocument]
    ended: Annotated[str, _one_of(Ending)]
    first_failed: Count | None
    seconds: NotRequired[Amount]
    clocks: NotRequired[list[ClockDocument]]


class SecondsDocument(TypedDict):
    """Wall-clock seconds of rank 0's training, and the sum over its training steps, which the original reported."""

    wall: Amount | None
    training: Amount | None


class GoalDocument(TypedDict):
    """`value` is the one that reached the goal, else the best; `last` the one at the end of a budget."""

    metric: str
    comparison: Annotated[str, _one_of(COMPARISONS)]
    threshold: float
    kind: Annotated[str, _one_of(KINDS)]
    value: float | None
    last: float | None
    wording: str
    reached: bool
    seconds: SecondsDocument | None


class WorkerDocument(TypedDict):
    """Like WorkerState, with times as RFC 3339."""

    rank: Count
    phase: Annotated[str, _one_of(Phase)]
    reason: str | None
    node: str | None
    exit_code: int | None
    started: Moment | None
    finished: Moment | None
    restarts: Count
    image_digest: str | None
    seconds: NotRequired[Amount]


class DataIdentityDocument(TypedDict):
    """A run's data: number of samples by part, digest of the decoded data, and whether they are official.

    `official` is None if unknown; `reason` says why they are not, or not known to be, official.
    """

    counts: dict[str, Amount]
    digest: str | None
    official: bool | None
    reason: str | None


class LabelDocument(TypedDict):
    """Whether the figures measure performance; `reason` says why not."""

    word: Annotated[str, _one_of(("performance", "functional"))]
    reason: str | None


class DivisionDocument(TypedDict):
    """The division, None for a run that has none; `reason` says why it is not closed."""

    word: Annotated[str, _one_of(("closed", "open"))] | None
    reason: str | None


class ConditionDocument(TypedDict):
    """A condition that applies, with the figures behind it."""

    reason: str
    figures: dict[str, float]


class ConditionsDocument(TypedDict):
    """The conditions of a run; None for one that does not apply."""

    measured: bool
    labels: list[Annotated[str, _one_of(LABELS)]]
    crowded: ConditionDocument | None
    contended: ConditionDocument | None
    quota_limited: ConditionDocument | None
    shared: ConditionDocument | None
    slow_network: ConditionDocument | None
    preloaded: NotRequired[ConditionDocument]


class SpreadDocument(TypedDict):
    """One figure over the ranks."""

    min: Amount
    mean: Amount
    max: Amount
    rank0: Amount


class SummaryDocument(TypedDict):
    """`network` of result.json: the lowest rates and the median round trip of the probe before the task."""

    asked: str | None
    method: str
    networks: Count | None
    rtt_seconds: Amount | None
    alone_bits_per_second: Amount | None
    together_bits_per_second: Amount | None
    first_bits_per_second: Amount | None
    held: bool | None  # None: nothing was requested, or nothing was measured
    problems: list[str]


class RecoveryDocument(TypedDict):
    """One attempt that ended early: seconds from the fault until the next attempt had redone the lost work."""

    at: Amount
    rank: Count | None
    why: str
    detection: float
    restart: float
    loading: float
    lost: float
    seconds: float


class FaultsDocument(TypedDict):
    """The part `faults` of result.json. Times in seconds since the first rank started."""

    script: str | None
    policy: str
    planned: Count  # whose time was reached
    injected: Count
    attempts: Count
    ranks: Count  # in the last attempt
    wall_seconds: Amount
    seconds: dict[str, float]  # by faults.PARTS
    goodput: float | None  # useful share of the wall time
    checkpoints: Count
    checkpoint_seconds: Amount | None  # mean time for which a checkpoint kept the ranks waiting
    recoveries: list[RecoveryDocument]
    timeline: list[list[Any]]  # part, begin, end; checkpointing and waiting are parts of useful
    events: list[list[Any]]  # injected faults: kind, target, begin, end


class ResultDocument(TypedDict):
    """result.json. All times in seconds; `timings` are over ranks, by category."""

    judge: Count
    run: str
    id: str
    task: str
    preset: str
    engine: str
    cluster: str
    backend: str
    workers: Count
    world_size: Count
    device: str
    outcome: Annotated[str, _one_of(Outcome)]
    exit_code: int | None  # of the rank that failed first
    summary: str
    started: Moment | None
    finished: Moment
    wall_seconds: Amount | None
    task_seconds: SecondsDocument
    goal: GoalDocument | None
    budget_seconds: Amount | None
    timings: dict[str, SpreadDocument]
    updates: Amount | None
    samples: Amount | None
    epochs: Amount | None
    synthetic: bool
    data: str | None
    data_identity: DataIdentityDocument | None  # None: not reported by the task
    label: LabelDocument
    division: DivisionDocument
    conditions: ConditionsDocument
    method: NotRequired[str]  # name of the communication method, unless it was the task's own
    network: NotRequired[SummaryDocument]  # if it was measured or requested
    faults: NotRequired[FaultsDocument]  # if faults occurred, or ranks could be restarted
    first_failed: Count | None
    ended: str | None
    worker_states: list[WorkerDocument]
    metrics: dict[str, float | str]  # rank 0's last values by name; nan, inf and -inf are strings
    progress: dict[str, Any]  # rank 0's last phase: phase, epoch, epochs, step, steps
    details: dict[str, Any]
    price: dict[str, Any] | None
    doubts: NotRequired[list[str]]  # codes of the findings that remove the official line
    official_line: str | None


class EnvironmentDocument(TypedDict):
    """environment.json: the facts that ranks reported, by rank."""

    ranks: dict[str, dict[str, Any]]
    ranks_left_out: Count


class ProbeDocument(TypedDict):
    """One probe. `links` are from a node to its right neighbor; `counters` are of each node's interface, since boot."""

    stage: Annotated[str, _one_of(("before", "after"))]
    form: str | None
    nodes: Count  # machines or pods of the run; workers on an emulated network
    networks: Count  # network stacks of the nodes; 1: all share one
    links: list[dict[str, float]]
    counters: list[dict[str, str | float]]
    seconds: Amount | None
    error: str | None


class TrafficDocument(TypedDict):
    """Traffic of the nodes' interfaces from the probe to the end of the task: maxima over nodes, sums for losses."""

    max_sent_bytes: Count
    max_received_bytes: Count
    dropped_packets: Count
    retransmitted_segments: Count


class NetworkDocument(TypedDict):
    """network.json."""

    asked: str | None
    method: str
    probes: list[ProbeDocument]
    traffic: TrafficDocument | None
    summary: SummaryDocument
    setup: NotRequired[dict[str, Any]]  # how the engine shaped it


class ShapingRecord(TypedDict):
    """shaping.json: what the engine did for --network."""

    method: str
    probes: list[dict[str, Any]]
    asked: NotRequired[str]
    setup: NotRequired[dict[str, Any]]  # the method, the kernel, and what was set
    attempts: NotRequired[Count]
    task: NotRequired[dict[str, Any] | None]  # what the links counted meanwhile
    notes: NotRequired[list[str]]  # what went wrong


class FaultsRecord(TypedDict):
    """faults.json: injected faults, and attempts."""

    script: str | None
    seed: Count
    policy: str
    began: Amount | None
    attempts: list[dict[str, Any]]
    events: list[dict[str, Any]]
    checkpoint_every: NotRequired[str | None]
    detect_seconds: NotRequired[Amount | None]
    ended: NotRequired[Amount | None]
    zero: NotRequired[Amount | None]
    missed: NotRequired[dict[str, Any] | None]  # the fault whose time had come when the run ended
    never_trained: NotRequired[bool]
    problem: NotRequired[str]


class NodeVerdictDocument(TypedDict):
    """A node in certificate.json."""

    node: str
    state: Annotated[str, _one_of(State)]
    reasons: list[str]
    tests: dict[str, float]
    serials: NotRequired[list[str]]  # of its GPUs


class CertificateFindingDocument(TypedDict):
    """A finding in certificate.json, with the facts behind it."""

    reason: Annotated[str, _one_of(REASONS)]
    nodes: list[str]
    state: Annotated[str, _one_of(State)]
    summary: str
    test: NotRequired[str]
    unit: NotRequired[str]
    shortfall: NotRequired[float | None]  # below its peers, as a share
    margin: NotRequired[dict[str, float]]
    confirmed: NotRequired[dict[str, float | None]]
    rank: NotRequired[Count]
    value: NotRequired[float | None]
    peers: NotRequired[dict[str, float | None]]
    groups: NotRequired[list[list[str]]]
    key: NotRequired[list[str] | None]
    evidence: NotRequired[str]
    digest: NotRequired[str | None]


class DriftDocument(TypedDict):
    """A fact in which some nodes differ from most."""

    key: str
    usual: str
    others: dict[str, list[str]]


class CertificateDocument(TypedDict):
    """certificate.json, as certify.judge.Acceptance makes it."""

    verdict: Annotated[str, _one_of(Verdict)]
    reason: str
    is_partial: bool
    contradictions: list[str]  # in the evidence; then the verdict is cannot_tell
    scope: dict[str, Any]
    method: dict[str, Any]
    nodes: list[NodeVerdictDocument]
    hardware: dict[str, str]
    fleet: dict[str, dict[str, Any]]
    findings: list[CertificateFindingDocument]
    drift: list[DriftDocument]
    delivers: dict[str, Any] | None


ReproductionWord = Annotated[str, _one_of(("reproduced", "different", "cannot_tell"))]


class ReproducedFigure(TypedDict):
    """One figure of a receipt, with the values of both sides."""

    name: str
    verdict: ReproductionWord
    reason: str
    original: list[float]
    reproduction: list[float]
    ratio: Amount | None
    low: Amount | None
    high: Amount | None


class DifferenceDocument(TypedDict):
    """What was not the same on both sides of a receipt."""

    name: str
    original: str
    reproduction: str
    matters: bool


class NamedRun(TypedDict):
    """A run that a receipt names, by the digest of its archive."""

    digest: str
    name: str
    id: str
    created: Moment


class ReceiptDocument(TypedDict):
    """A receipt, which says whether runs reproduce an earlier result."""

    kind: Annotated[str, _one_of(("receipt",))]
    mlbench: str
    created: Moment
    verdict: ReproductionWord
    reason: str
    margin: Amount
    confidence: Amount
    figures: list[ReproducedFigure]
    not_the_same: list[DifferenceDocument]
    sessions: str
    original: list[NamedRun]
    reproduction: list[NamedRun]


DOCUMENTS: Mapping[str, Any] = {
    run_folder.RUN: RunDocument,
    run_folder.OBSERVATION: ObservationDocument,
    run_folder.RESULT: ResultDocument,
    run_folder.ENVIRONMENT: EnvironmentDocument,
    run_folder.FINDINGS: FindingsDocument,
    run_folder.CERTIFICATE: CertificateDocument,
    run_folder.NETWORK: NetworkDocument,
    run_folder.SHAPING: ShapingRecord,
    run_folder.FAULTS: FaultsRecord,
}
# All published schemas: those of an archive's documents, and that of receipts.
PUBLISHED: Mapping[str, Any] = {**DOCUMENTS, "receipt.json": ReceiptDocument}


def publish(name: str) -> dict[str, Any]:
    """The JSON Schema of the document `name`, as published in docs/schemas."""
    schema = msgspec.json.schema(PUBLISHED[name])
    own = schema["$defs"].pop(schema["$ref"].rpartition("/")[2])
    own["properties"] = {"schema_version": {"type": "integer", "enum": [SCHEMA_VERSION]}, **own["properties"]}
    own["required"] = ["schema_version", *own["required"]]
    for each in (own, *schema["$defs"].values()):
        each["additionalProperties"] = False
    definitions = {"$defs": schema["$defs"]} if schema["$defs"] else {}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **own, "title": name, **definitions}
