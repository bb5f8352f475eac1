"""JSON Schemas of an archive's documents, and a validator for the subset of JSON Schema that they use.

The schemas are published in docs/schemas. `validate` supports type, enum, minimum, maximum, format date-time, required,
properties, additionalProperties and items.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mlbench_cli.certify.judge import REASONS, State, Verdict
from mlbench_cli.model.goals import COMPARISONS, KINDS, is_finite_number
from mlbench_cli.model.run import Ending, Outcome, Phase
from mlbench_cli.results.archive.conditions import LABELS, RARE
from mlbench_cli.results.archive.events import SPREAD
from mlbench_cli.storage import run_folder
from mlbench_cli.util.times import MAX_SECONDS, parse_timestamp

Schema = Mapping[str, Any]

_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_AMOUNT: Schema = {"type": "number", "minimum": 0}
_CLOCK_TIME: Schema = {"type": "number", "minimum": 0, "maximum": MAX_SECONDS}  # seconds since 1970, to the year 9999
_NUMBER: Schema = {"type": "number"}
_METRIC: Schema = {"type": ["number", "string"]}  # or nan, inf, -inf
_CODE: Schema = {"type": "integer"}
_MOMENT: Schema = {"type": "string", "format": "date-time"}
_ANY_OBJECT: Schema = {"type": "object"}


def _optional(schema: Schema) -> Schema:
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    more = {"enum": [*schema["enum"], None]} if "enum" in schema else {}
    return {**schema, "type": [*types, "null"], **more}


def _one_of(*values: str) -> Schema:
    return {"type": "string", "enum": [str(value) for value in values]}


def _list(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def _map(schema: Schema) -> Schema:
    return {"type": "object", "additionalProperties": schema}


def _object(optional: Mapping[str, Schema] | None = None, **fields: Schema) -> Schema:
    return {"type": "object", "properties": {**fields, **(optional or {})}, "required": list(fields)}


_SECONDS = _object(wall=_optional(_AMOUNT), training=_optional(_AMOUNT))
_GOAL = _object(
    metric=_TEXT,
    comparison=_one_of(*COMPARISONS),
    threshold=_NUMBER,
    kind=_one_of(*KINDS),
    value=_optional(_NUMBER),
    last=_optional(_NUMBER),
    wording=_TEXT,
    reached=_FLAG,
    seconds=_optional(_SECONDS),
)
_FINDING = _object(
    {"hint": _optional(_TEXT), "retryable": _FLAG, "permanent": _FLAG, "evidence": _ANY_OBJECT},
    code=_TEXT,
    summary=_TEXT,
)


_CONDITION = _optional(_object(reason=_TEXT, figures=_map(_NUMBER)))
_CONDITIONS = _object(
    dict.fromkeys(RARE, _CONDITION),
    measured=_FLAG,
    labels=_list(_one_of(*LABELS)),
    **dict.fromkeys([label for label in LABELS if label not in RARE], _CONDITION),
)


_DATA_IDENTITY = _object(
    counts=_map(_AMOUNT), digest=_optional(_TEXT), official=_optional(_FLAG), reason=_optional(_TEXT)
)
_NETWORK = _object(
    asked=_optional(_TEXT),
    method=_TEXT,
    networks=_optional(_COUNT),
    **dict.fromkeys(
        ("rtt_seconds", "alone_bits_per_second", "together_bits_per_second", "first_bits_per_second"),
        _optional(_AMOUNT),
    ),
    held=_optional(_FLAG),
    problems=_list(_TEXT),
)
_PROBE = _object(
    {"drained_bytes": _AMOUNT, "drained_bits_per_second": _AMOUNT},
    stage=_one_of("before", "after"),
    form=_optional(_TEXT),
    ranks=_COUNT,
    networks=_COUNT,
    links=_list(_map(_NUMBER)),
    counters=_list(_ANY_OBJECT),
    seconds=_optional(_AMOUNT),
    error=_optional(_TEXT),
)


_CLOCK = _object(
    node=_optional(_TEXT),
    stepped_seconds=_AMOUNT,
    start_ahead=_optional(_NUMBER),
    end_ahead=_optional(_NUMBER),
    error=_optional(_AMOUNT),
)


_FAULTS = _object(
    script=_optional(_TEXT),
    policy=_TEXT,
    **dict.fromkeys(("planned", "injected", "attempts", "ranks", "checkpoints"), _COUNT),
    wall_seconds=_AMOUNT,
    seconds=_map(_NUMBER),
    goodput=_optional(_NUMBER),
    checkpoint_seconds=_optional(_AMOUNT),
    timeline=_list({"type": "array"}),
    events=_list({"type": "array"}),
    recoveries=_list(
        _object(
            at=_AMOUNT,
            rank=_optional(_COUNT),
            why=_TEXT,
            **dict.fromkeys(("detection", "restart", "loading", "lost", "seconds"), _NUMBER),
        )
    ),
)


def _worker(moment: Schema) -> Schema:
    return _object(
        {"restarts": _COUNT, "image_digest": _optional(_TEXT), "seconds": _AMOUNT},
        rank=_COUNT,
        phase=_one_of(*Phase),
        reason=_optional(_TEXT),
        node=_optional(_TEXT),
        exit_code=_optional(_CODE),
        started=_optional(moment),
        finished=_optional(moment),
    )


SCHEMAS: Mapping[str, Schema] = {
    run_folder.RUN: _object(
        {"task": _optional(_ANY_OBJECT), "mlbench": _TEXT, "provenance": _optional(_ANY_OBJECT), "repeats": _COUNT},
        id=_TEXT,
        name=_TEXT,
        created=_MOMENT,
        spec_hash=_TEXT,
        spec=_object(task=_TEXT, workers=_COUNT),
    ),
    run_folder.OBSERVATION: _object(
        {"topology": _map(_map(_TEXT)), "seconds": _AMOUNT, "clocks": _list(_CLOCK)},
        time=_CLOCK_TIME,
        workers=_list(_worker(_CLOCK_TIME)),
        findings=_list(_FINDING),
        ended=_one_of(*Ending),
        first_failed=_optional(_COUNT),
    ),
    run_folder.RESULT: _object(
        {
            "method": _TEXT,
            "network": _NETWORK,
            "doubts": _list(_TEXT),
            "faults": _FAULTS,
        },
        judge=_COUNT,
        summary=_TEXT,
        ended=_optional(_TEXT),
        metrics=_map(_METRIC),
        progress=_ANY_OBJECT,
        conditions=_CONDITIONS,
        data_identity=_optional(_DATA_IDENTITY),
        **dict.fromkeys(("run", "id", "task", "preset", "engine", "cluster", "backend", "device"), _TEXT),
        **dict.fromkeys(("workers", "world_size"), _COUNT),
        outcome=_one_of(*Outcome),
        exit_code=_optional(_CODE),
        started=_optional(_MOMENT),
        finished=_MOMENT,
        wall_seconds=_optional(_AMOUNT),
        task_seconds=_SECONDS,
        goal=_optional(_GOAL),
        timings=_map(_object(**dict.fromkeys(SPREAD, _AMOUNT))),
        **dict.fromkeys(("updates", "samples", "epochs", "budget_seconds"), _optional(_AMOUNT)),
        synthetic=_FLAG,
        data=_optional(_TEXT),
        division=_object(word=_optional(_one_of("closed", "open")), reason=_optional(_TEXT)),
        label=_object(word=_one_of("functional", "performance"), reason=_optional(_TEXT)),
        first_failed=_optional(_COUNT),
        worker_states=_list(_worker(_MOMENT)),
        details=_ANY_OBJECT,
        price=_optional(_ANY_OBJECT),
        official_line=_optional(_TEXT),
    ),
    run_folder.ENVIRONMENT: _object({"ranks_left_out": _COUNT}, ranks=_map(_ANY_OBJECT)),
    run_folder.FINDINGS: _object(findings=_list(_FINDING)),
    run_folder.CERTIFICATE: _object(
        verdict=_one_of(*Verdict),
        reason=_TEXT,
        is_partial=_FLAG,
        scope=_ANY_OBJECT,
        method=_ANY_OBJECT,
        nodes=_list(_object(node=_TEXT, state=_one_of(*State), reasons=_list(_TEXT), tests=_map(_NUMBER))),
        hardware=_map(_TEXT),
        fleet=_map(_ANY_OBJECT),
        findings=_list(_object(reason=_one_of(*REASONS), nodes=_list(_TEXT), state=_one_of(*State), summary=_TEXT)),
        drift=_list(_object(key=_TEXT, usual=_TEXT, others=_map(_list(_TEXT)))),
        delivers=_optional(_ANY_OBJECT),
    ),
    run_folder.NETWORK: _object(
        {"setup": _ANY_OBJECT},
        asked=_optional(_TEXT),
        method=_TEXT,
        probes=_list(_PROBE),
        traffic=_optional(
            _object(
                **dict.fromkeys(
                    ("max_sent_bytes", "max_received_bytes", "dropped_packets", "retransmitted_segments"), _COUNT
                )
            )
        ),
        summary=_NETWORK,
    ),
    run_folder.SHAPING: _object(method=_TEXT, probes=_list(_ANY_OBJECT)),
    run_folder.FAULTS: _object(
        {
            "checkpoint_every": _optional(_TEXT),
            "detect_seconds": _optional(_AMOUNT),
            "ended": _optional(_AMOUNT),
            "zero": _optional(_AMOUNT),
            "problem": _TEXT,
        },
        script=_optional(_TEXT),
        seed=_COUNT,
        policy=_TEXT,
        began=_optional(_AMOUNT),
        attempts=_list(_ANY_OBJECT),
        events=_list(_ANY_OBJECT),
    ),
}


_RUN_OF_RECEIPT = _object(digest=_TEXT, name=_TEXT, id=_TEXT, created=_MOMENT)
_VERDICT = _one_of("reproduced", "different", "cannot_tell")
RECEIPT = _object(
    kind=_one_of("receipt"),
    mlbench=_TEXT,
    created=_MOMENT,
    verdict=_VERDICT,
    reason=_TEXT,
    margin=_AMOUNT,
    confidence=_AMOUNT,
    figures=_list(
        _object(
            name=_TEXT,
            verdict=_VERDICT,
            reason=_TEXT,
            original=_list(_NUMBER),
            reproduction=_list(_NUMBER),
            **dict.fromkeys(("ratio", "low", "high"), _optional(_AMOUNT)),
        )
    ),
    not_the_same=_list(_object(name=_TEXT, original=_TEXT, reproduction=_TEXT, matters=_FLAG)),
    sessions=_TEXT,
    original=_list(_RUN_OF_RECEIPT),
    reproduction=_list(_RUN_OF_RECEIPT),
)
# All published schemas: those of an archive's documents, and that of receipts.
PUBLISHED: Mapping[str, Schema] = {**SCHEMAS, "receipt.json": RECEIPT}


def publish(name: str) -> dict[str, Any]:
    """The JSON Schema of the document `name`, as published in docs/schemas."""
    schema = PUBLISHED[name]
    version = {"schema_version": {"type": "integer", "enum": [1]}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": name,
        **schema,
        "properties": {**version, **schema["properties"]},
        "required": ["schema_version", *schema["required"]],
    }


def validate(value: Any, schema: Schema, path: str = "") -> Iterator[str]:
    """The violations of `schema` by `value`, one sentence each with the name of the field."""
    shown = f'"{path}"' if path else "the document"
    if not _has_type(value, schema["type"]) or ("enum" in schema and value not in schema["enum"]):
        yield f"{shown} is {brief(value)}, which it cannot be"
        return
    if value is None:
        return
    if ("minimum" in schema and value < schema["minimum"]) or ("maximum" in schema and value > schema["maximum"]):
        yield f"{shown} is {brief(value)}, which it cannot be"
    if schema.get("format") == "date-time" and not _is_moment(value):
        yield f"{shown} is {brief(value)}, not a time as RFC 3339"
    for key in schema.get("required", ()):
        if key not in value:
            yield f'"{_join(path, key)}" is missing'
    properties, others = schema.get("properties", {}), schema.get("additionalProperties")
    if isinstance(value, dict):
        for key, item in value.items():
            if (inner := properties.get(key, others)) is not None:
                yield from validate(item, inner, _join(path, key))
    elif isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            yield from validate(item, schema["items"], f"{path}[{index}]")


def _has_type(value: Any, types: str | list[str]) -> bool:
    return any(_TYPES[kind](value) for kind in ([types] if isinstance(types, str) else types))


_TYPES: dict[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": is_finite_number,
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
}


def _is_moment(value: str) -> bool:
    try:
        parse_timestamp(value)
    except ValueError:
        return False
    return value.endswith("Z")


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def brief(value: Any) -> str:
    """The value's repr, truncated to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
