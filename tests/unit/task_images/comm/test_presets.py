"""The table of methods: every preset is legal, everything else is refused with a neighbor that is legal."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from task_images.comm.methods import AXES, RULES, Method, MethodError, check, parse_size
from task_images.comm.presets import PRESETS, list_companions, resolve

SAMPLES = {
    "plan": ("tensor", "all", "threshold:1MiB", "optimal"),
    "partition": ("none", "1MB"),
    "order": ("fifo", "priority", "deferred"),
    "agreement": ("static", "leader"),
    "barrier": ("step", "none"),
    "codec": ("none", "fp16", "sign", "topk:0.1", "randomk:0.1", "qsgd:7", "powersgd:2"),
    "feedback": ("none", "ef"),
    "scope": ("tensor", "message"),
    "warmup": ("none", "10"),
    "momentum": ("none", "0.9"),
    "selection": ("exact", "sampled"),
    "transport": ("allreduce", "rsag", "allgather", "a2a", "gtopk", "ps", "gossip", "noop"),
    "staleness": ("sync", "async", "ssp:1"),
    "servers": ("0", "1"),
    "sync": ("every", "local:2", "postlocal:3,2"),
    "engine": ("reducer", "ddp", "fsdp2"),
}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_legal_on_four_workers(name: str) -> None:
    check(resolve(name), 4)


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_refused_comes_with_a_neighbor_that_is_legal(name: str) -> None:
    for axis, values in SAMPLES.items():
        for value in values:
            method = replace(resolve(name), **{axis: value})
            error = find_error(method)
            if error is None or error.instead.startswith(("--servers", "--method")):
                continue
            assert error.reason
            parts = [part.removeprefix("comm.") for part in error.instead.split() if part != "--set"]
            check(replace(method, **dict(part.split("=", 1) for part in parts)), 4)


def find_error(method: Method) -> MethodError | None:
    try:
        check(method, 4)
    except MethodError as error:
        return error
    return None


def test_every_rule_refuses_something() -> None:
    methods = [
        replace(resolve(name), **{axis: value}) for name in PRESETS for axis in SAMPLES for value in SAMPLES[axis]
    ]
    for rule in RULES:
        assert any(rule.when(method) and not rule.holds(method) for method in methods), rule.reason


@pytest.mark.parametrize(
    ("axis", "value"),
    [
        *(
            ("codec", value)
            for value in ("topk:0", "topk:1.5", "topk:nan", "topk:", "topk", "zip", "qsgd:128", "powersgd:0")
        ),
        *(("plan", value) for value in ("threshold:", "threshold:-1", "threshold:x", "threshold:1YB", "all:3")),
        *(("sync", value) for value in ("local:0", "postlocal:1", "postlocal:1,0")),
        *(("staleness", value) for value in ("ssp:-1", "ssp", "late")),
        *(("servers", value) for value in ("-1", "65", "many")),
        *(("delay", value) for value in ("1", "1,inf", "-1,0", "a,b")),
        ("momentum", "1"),
    ],
)
def test_values_out_of_range_are_refused(axis: str, value: str) -> None:
    with pytest.raises(MethodError, match=f"comm.{axis} is"):
        resolve("fusion", {axis: value})


def test_unknown_names_are_refused() -> None:
    with pytest.raises(MethodError, match="no method"):
        resolve("nothing")
    with pytest.raises(MethodError, match='no axis "color"'):
        resolve("fusion", {"color": "red"})
    with pytest.raises(MethodError, match="more servers than workers"):
        check(resolve("bsp-ps", {"servers": "3"}), 2)
    with pytest.raises(MethodError, match="two groups"):
        check(resolve("hsdp"), 2)


def test_sizes_are_read() -> None:
    assert [parse_size(text) for text in ("4096000", "25MiB", "4MB", "1kB", "0.5KiB")] == [
        *(4_096_000, 25 * 2**20, 4_000_000, 1000, 512)
    ]


def test_a_method_survives_as_a_document() -> None:
    for name in PRESETS:
        assert Method.from_dict(resolve(name).to_dict()) == resolve(name)
    with pytest.raises(MethodError):
        Method.from_dict({"color": "red"})
    with pytest.raises(MethodError):
        Method.from_dict({"plan": "sideways"})


def test_companions_are_legal() -> None:
    assert "fp16" in list_companions("fusion")["codec"]
    assert "fp16" not in list_companions("topk").get("codec", ())
    assert set(list_companions("fusion")) <= set(AXES)


def test_every_preset_has_its_row_among_what_methods_reach() -> None:
    page = (Path(__file__).parents[4] / "docs" / "explanation" / "methods-measured.md").read_text()
    rows = re.findall(r"^\| `([a-z0-9-]+)`(?: \\\*|, decoder \\\*)? \|", page, re.M)
    assert list(dict.fromkeys(rows)) == list(PRESETS)


def test_the_table_is_read_without_torch() -> None:
    code = "import sys, task_images.comm.presets, task_images.comm.plans; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
