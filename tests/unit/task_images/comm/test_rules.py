"""Which combinations of axes are valid, the nearest valid one for the others, values at their bounds, and bytes by
hand."""

from dataclasses import replace

import pytest

from task_images.comm.methods import (
    Method,
    MethodError,
    check,
    check_values,
    count_topk,
    find_density,
    parse_size,
    payload_bytes,
)
from task_images.comm.presets import list_companions, resolve


def options(**changes: str) -> str:
    return " ".join(f"--set comm.{axis}={value}" for axis, value in changes.items())


@pytest.mark.parametrize(
    ("name", "axis", "value", "nearest"),
    [
        # torch's engines
        ("ddp", "plan", "tensor", options(plan="threshold:25MiB")),
        ("ddp", "plan", "threshold:1MiB", ""),
        ("ddp", "order", "priority", options(order="fifo")),
        ("ddp", "partition", "1MB", options(partition="none")),
        ("ddp", "sync", "local:2", options(sync="every")),
        ("ddp", "barrier", "none", options(barrier="step")),
        ("ddp", "delay", "0,0", options(delay="none")),
        ("ddp", "transport", "rsag", options(transport="allreduce")),
        ("ddp", "codec", "fp16", ""),
        ("ddp", "codec", "bf16", ""),
        ("ddp", "codec", "randomk:0.1", options(codec="none")),
        ("fsdp2", "codec", "fp16", options(codec="none")),
        ("zero1", "codec", "bf16", options(codec="none")),
        ("ddp", "agreement", "leader", options(agreement="static")),
        # registered methods
        ("fusion", "options", "a=1", options(options="none")),
        ("slowmo", "codec", "fp16", options(codec="none")),
        ("slowmo", "delay", "0.1,0", ""),
        # codecs and transports
        ("fusion", "codec", "sign", options(transport="allgather")),
        ("fusion", "codec", "topk:0.1", options(transport="allgather")),
        ("fusion", "codec", "qsgd:7", options(transport="allgather")),
        ("fusion", "codec", "powersgd:2", options(feedback="ef")),
        ("fusion", "codec", "randomk:0.5", ""),
        ("dear", "codec", "fp16", ""),
        ("dear", "codec", "randomk:0.1", options(barrier="step", transport="allreduce")),
        ("signsgd-mv", "transport", "a2a", ""),
        ("ef-signsgd", "transport", "a2a", options(feedback="none")),
        ("gtopk", "scope", "tensor", options(scope="message")),
        ("qsgd", "selection", "sampled", options(selection="exact")),
        ("topk", "selection", "sampled", ""),
        # parameter servers
        ("fusion", "staleness", "async", options(staleness="sync")),
        ("wfbp-ps", "staleness", "async", options(plan="all")),
        ("async-ps", "codec", "fp16", options(codec="none")),
        ("async-ps", "barrier", "none", options(barrier="step")),
        ("async-ps", "staleness", "sync", ""),
        ("fusion", "transport", "ps", options(servers="1")),
        ("fusion", "servers", "1", options(servers="0")),
        ("bsp-ps", "servers", "0", options(servers="1")),
        # error feedback, momentum, warm-up
        ("fusion", "feedback", "ef", options(feedback="none")),
        ("fp16", "feedback", "ef", options(feedback="none")),
        ("choco", "feedback", "ef", options(feedback="none")),
        ("qsgd", "feedback", "ef", ""),
        ("gtopk", "feedback", "none", options(feedback="ef")),
        ("powersgd", "feedback", "none", options(feedback="ef")),
        ("powersgd", "partition", "1MB", options(partition="none")),
        ("topk", "momentum", "0.9", options(momentum="none")),
        ("eftopk", "momentum", "0.9", options(order="deferred")),
        ("dgc", "order", "fifo", options(order="deferred")),
        ("fp16", "warmup", "10", options(warmup="none")),
        ("topk", "warmup", "10", ""),
        ("powersgd", "warmup", "10", ""),
        ("choco", "warmup", "10", options(warmup="none")),
        # gossip and local steps
        ("dpsgd", "plan", "tensor", options(plan="all", order="deferred")),
        ("dpsgd", "barrier", "none", options(order="deferred", barrier="step")),
        ("dpsgd", "partition", "1MB", options(partition="none", order="deferred")),
        ("dpsgd", "order", "priority", options(order="deferred")),
        ("choco", "order", "fifo", options(order="deferred")),
        ("choco", "codec", "topk:0.05", ""),
        ("choco", "codec", "topk:0.049", options(codec="topk:0.1")),
        ("localsgd", "transport", "rsag", options(transport="allreduce")),
        ("localsgd", "codec", "fp16", options(codec="none")),
        ("localsgd", "barrier", "none", options(barrier="step")),
        # without a barrier; with a leader
        ("fusion", "barrier", "none", ""),
        ("fp16", "barrier", "none", ""),
        ("qsgd", "barrier", "none", options(barrier="step")),
        ("bsp", "barrier", "none", options(order="fifo")),
        ("fusion", "agreement", "leader", ""),
        ("bsp", "agreement", "leader", options(agreement="static")),
        ("localsgd", "agreement", "leader", options(agreement="static")),
        ("wfbp-ps", "agreement", "leader", options(agreement="static")),
        ("noop", "agreement", "leader", options(agreement="static")),
        ("dpsgd", "agreement", "leader", options(agreement="static")),
    ],
)
def test_a_preset_with_one_changed_axis_is_valid_or_names_the_nearest_valid_one(
    name: str, axis: str, value: str, nearest: str
) -> None:
    method = resolve(name, {axis: value})
    if not nearest:
        check(method)
        return
    with pytest.raises(MethodError) as caught:
        check(method)
    assert caught.value.instead == nearest
    changes = [part.partition("=") for part in nearest.replace("--set comm.", "").split()]
    check(replace(method, **{axis: value for axis, _, value in changes}))


@pytest.mark.parametrize(
    ("codec", "others"),
    [
        ("sign", {"transport": "ps", "servers": "1"}),
        ("topk:0.1", {"transport": "ps", "servers": "1"}),
        ("topk:0.1", {"transport": "gossip", "plan": "all", "order": "deferred"}),
        ("topk:0.1", {"transport": "gtopk", "feedback": "ef", "scope": "message"}),
        ("topk:0.1", {"transport": "ps", "servers": "1", "feedback": "ef", "momentum": "0.5", "order": "deferred"}),
        ("randomk:0.1", {"transport": "ps", "servers": "1"}),
        ("qsgd:7", {"transport": "ps", "servers": "1"}),
        ("fp16", {"transport": "ps", "servers": "1"}),
        ("bf16", {"transport": "rsag"}),
        ("bf16", {"transport": "noop"}),
        ("none", {"transport": "rsag", "barrier": "none", "order": "priority"}),
        ("none", {"sync": "postlocal:0,1"}),
    ],
)
def test_each_codec_travels_over_each_of_its_transports(codec: str, others: dict[str, str]) -> None:
    check(replace(Method(codec=codec), **others))


@pytest.mark.parametrize(
    ("name", "servers", "trainers", "option"),
    [
        ("bsp-ps", "2", 2, ""),
        ("bsp-ps", "3", 2, "--servers 2"),
        ("bsp-ps", "1", 1, ""),
        ("bsp-ps", "2", 1, "--servers 1"),
        ("hsdp", "0", 4, ""),
        ("hsdp", "0", 6, ""),
        ("hsdp", "0", 5, "--method fsdp2"),
        ("hsdp", "0", 3, "--method fsdp2"),
        ("hsdp", "0", 2, "--method fsdp2"),
        ("fsdp2", "0", 1, ""),
    ],
)
def test_the_number_of_workers_limits_servers_and_groups(name: str, servers: str, trainers: int, option: str) -> None:
    method = resolve(name, {"servers": servers})
    check(method)
    if not option:
        check(method, trainers)
        return
    with pytest.raises(MethodError, match=str(trainers)) as caught:
        check(method, trainers)
    assert caught.value.instead == option


@pytest.mark.parametrize(
    ("axis", "just_valid", "just_invalid"),
    [
        ("codec", ("topk:1", "topk:1e-9", "qsgd:1", "qsgd:127", "powersgd:1", "powersgd:4096", "randomk:1.0"), ()),
        ("codec", (), ("topk:1.01", "qsgd:0", "qsgd:128", "powersgd:4097", "randomk:0", "fp16:1", "sign:", "qsgd:+7")),
        ("momentum", ("1e-6", "0.999"), ("0", "1", "-0.5", "nan")),
        ("warmup", ("1", "1000000"), ("0", "1000001", "1.5", "٣")),
        ("staleness", ("ssp:0", "ssp:1000000"), ("ssp:1000001", "ssp:", "async:1")),
        ("servers", ("0", "64"), ("65", "1.0", "")),
        ("delay", ("0,0", "59.9,59.9"), ("60,0", "0,60", "-1,0", "0", "0,0,0", "nan,0")),
        ("sync", ("local:1", "local:1000000", "postlocal:0,1", "postlocal:1000000000,1000000"), ()),
        ("sync", (), ("local:1000001", "postlocal:1000000001,1", "postlocal:1,1000001", "postlocal:5", "every:1")),
        ("credit", ("1", "1B", "1.5kB", "1048575GiB"), ("0", "1048576GiB", "MiB", "1TB", "-1")),
        ("partition", ("none", "1"), ("0", "None")),
        ("plan", ("threshold:0.5KiB", "mgwfbp"), ("threshold", "threshold:0", "optimal:1")),
        ("options", ("none", "a=1", "a=1,b=-2.5e3"), ("a", "a=", "a=inf", "a=1,b")),
    ],
)
def test_values_at_and_beyond_the_bounds_of_their_axis(
    axis: str, just_valid: tuple[str, ...], just_invalid: tuple[str, ...]
) -> None:
    for value in just_valid:
        check_values(replace(Method(), **{axis: value}))
    for value in just_invalid:
        with pytest.raises(MethodError, match=f"comm.{axis} is") as caught:
            check_values(replace(Method(), **{axis: value}))
        assert caught.value.instead == f"--set comm.{axis}={getattr(Method(), axis)}"


@pytest.mark.parametrize("text", ["", "B", "1kiB", "1Kib", "1TiB", "nan", "inf", "0", "-5", "1048576GiB"])
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"size|float"):
        parse_size(text)


@pytest.mark.parametrize(
    ("codec", "scope", "written"),
    [
        ("topk:0.1", "tensor", "tensor"),
        ("topk:0.1", "message", None),
        ("sign", "message", None),
        ("randomk:0.1", "tensor", "tensor"),
        ("qsgd:7", "tensor", None),
        ("qsgd:7", "message", "message"),
    ],
)
def test_old_documents_of_codecs_with_a_scope_compressed_whole_messages(
    codec: str, scope: str, written: str | None
) -> None:
    method = Method(codec=codec, scope=scope)
    document = method.to_dict()
    assert document.get("scope") == written
    assert Method.from_dict(document) == method


@pytest.mark.parametrize(
    ("codec", "feedback", "scope", "size"),
    [
        # Tensors of 1000, 9 and 1 elements.
        ("none", "none", "tensor", 4040),
        ("fp16", "none", "tensor", 2020),
        ("bf16", "none", "message", 2020),
        ("sign", "none", "tensor", 127),  # 1010 bits
        ("sign", "ef", "tensor", 127 + 3 * 4),
        ("sign", "ef", "message", 127 + 4),
        ("topk:0.1", "none", "tensor", 8 * (100 + 1 + 1)),
        ("topk:0.1", "ef", "message", 8 * 101),
        ("randomk:0.5", "ef", "tensor", 4 * (500 + 4 + 1)),
        ("randomk:0.5", "ef", "message", 4 * 505),
        ("qsgd:7", "none", "tensor", 1010 + 4 * 2),
    ],
)
def test_bytes_of_a_message_counted_by_hand(codec: str, feedback: str, scope: str, size: int) -> None:
    assert payload_bytes(Method(codec=codec, feedback=feedback, scope=scope), [1000, 9, 1]) == size


@pytest.mark.parametrize(("size", "density", "count"), [(99, 0.01, 1), (200, 0.01, 2), (299, 0.01, 2), (5, 1.0, 5)])
def test_a_share_of_the_elements_is_rounded_down_to_one_at_least(size: int, density: float, count: int) -> None:
    assert count_topk(size, density) == count


@pytest.mark.parametrize(
    ("update", "density"),
    [(1, 0.25), (2, 0.25), (3, 0.0625), (4, 0.0625), (5, 0.015625), (7, 0.01), (10, 0.01), (11, 0.01)],
)
def test_a_warm_up_of_10_updates_divides_the_density_by_4_after_every_second_one(update: int, density: float) -> None:
    assert find_density(0.01, 10, update) == density
    assert find_density(0.01, 0, update) == 0.01


@pytest.mark.parametrize(
    ("name", "axis", "values"),
    [
        ("bsp-ps", "staleness", ["async", "ssp:BOUND"]),
        ("bsp-ps", "servers", ["NUMBER"]),
        ("bsp-ps", "partition", ["none", "SIZE"]),
        ("bsp-ps", "codec", ["fp16", "bf16", "sign", "topk:DENSITY", "randomk:DENSITY", "qsgd:LEVELS"]),
        ("eftopk", "momentum", []),  # needs order deferred
        ("eftopk", "warmup", ["STEPS"]),
        ("choco", "codec", ["none", "topk:DENSITY"]),
        ("slowmo", "delay", ["ALPHA,BETA"]),
        ("slowmo", "codec", []),
    ],
)
def test_companions_of_other_methods(name: str, axis: str, values: list[str]) -> None:
    assert list_companions(name).get(axis, []) == values
