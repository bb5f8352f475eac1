"""What a rank computes in a step: totals, slower machines, and a backward pass divided by weights."""

import pytest

from mlbench_cli.simulator.models import MODELS, ModelParameter, bert, resnet50, workload_of
from mlbench_cli.simulator.workload import CodecCost, Tensor, Workload, spread_backward

CODEC = CodecCost("fp16", 2, 1e-9, 2e-9)
WORK = Workload((Tensor("b", 10, 2.0, 1), Tensor("a", 30, 4.0, 5)), 1.0, 4.0, 0.5, 0.25, 0.1, (CODEC,), 1.5)


def test_a_step_is_the_backward_passs_end_the_update_and_the_rest() -> None:
    assert WORK.seconds == 4.75
    assert WORK.size == 40
    assert Workload((), 1.0, 4.0).seconds == 4.0


def test_a_slower_machine_takes_longer_for_everything_but_the_network() -> None:
    assert WORK.scale(2.0) == Workload(
        (Tensor("b", 10, 4.0, 1), Tensor("a", 30, 8.0, 5)), 2.0, 8.0, 1.0, 0.5, 0.1, (CODEC,), 3.0
    )


def test_the_backward_pass_is_divided_by_weights_from_the_last_tensor_on() -> None:
    found = spread_backward([("a", 4), ("b", 8), ("c", 12)], [1.0, 3.0, 0.0], 2.0, 6.0, 0.5)
    assert found == Workload((Tensor("c", 12, 2.0), Tensor("b", 8, 5.0), Tensor("a", 4, 6.0)), 2.0, 6.0, 0.5)


def test_without_weights_all_gradients_are_ready_with_the_forward_pass() -> None:
    found = spread_backward([("a", 4), ("b", 8)], [0.0, 0.0], 2.0, 6.0)
    assert [tensor.ready for tensor in found.tensors] == [2.0, 2.0]
    assert (found.backward, found.optimizer) == (6.0, 0.0)


def test_every_tensor_has_a_weight() -> None:
    with pytest.raises(ValueError, match="zip"):
        spread_backward([("a", 4), ("b", 8)], [1.0], 2.0, 6.0)


def test_a_third_of_a_models_step_is_its_forward_pass() -> None:
    found = workload_of([ModelParameter("a", 10, 2.0), ModelParameter("b", 5, 6.0)], 9.0)
    assert found == Workload((Tensor("b", 20, 7.5), Tensor("a", 40, 9.0)), 3.0, 9.0)


def test_resnet50_takes_four_billion_multiply_adds_an_image() -> None:
    """torchvision documents 4.09 GFLOPS (multiply-adds) for its ResNet-50."""
    assert sum(each.operations for each in resnet50()) == pytest.approx(4.09e9, rel=0.002)


@pytest.mark.parametrize(
    ("name", "elements", "operations"),
    [
        ("conv1.weight", 9408, 118_013_952),
        ("conv1.norm.weight", 64, 0),
        ("layer1.0.conv1.weight", 4096, 12_845_056),
        ("layer1.0.downsample.weight", 16_384, 51_380_224),
        ("layer2.0.conv1.weight", 32_768, 102_760_448),
        ("layer2.0.conv2.weight", 147_456, 115_605_504),
        ("layer4.2.conv3.weight", 1_048_576, 51_380_224),
        ("layer4.2.conv3.norm.bias", 2048, 0),
        ("fc.weight", 2_048_000, 2_048_000),
        ("fc.bias", 1000, 0),
    ],
)
def test_layers_of_resnet50(name: str, elements: int, operations: float) -> None:
    """Sizes of the layers' tables of fvcore: weights times the pixels of the output."""
    assert [(each.elements, each.operations) for each in resnet50() if each.name == name] == [(elements, operations)]


def test_tensors_of_resnet50_are_in_the_order_of_the_forward_pass() -> None:
    names = [each.name for each in resnet50()]
    assert names[:4] == ["conv1.weight", "conv1.norm.weight", "conv1.norm.bias", "layer1.0.conv1.weight"]
    assert names[-2:] == ["fc.weight", "fc.bias"]
    assert names[12] == "layer1.0.downsample.weight"
    assert sum(name.endswith("downsample.weight") for name in names) == 4
    assert len({*names}) == len(names) == 161


@pytest.mark.parametrize(
    ("name", "elements", "operations"),
    [
        ("embeddings.words", 23_445_504, 0),
        ("embeddings.positions", 393_216, 0),
        ("embeddings.types", 1536, 0),
        ("embeddings.norm.weight", 768, 0),
        ("layer.0.query.weight", 589_824, 589_824),
        ("layer.11.output.bias", 768, 0),
        ("layer.5.intermediate.weight", 2_359_296, 2_359_296),
        ("layer.5.intermediate.bias", 3072, 0),
        ("layer.5.dense.weight", 2_359_296, 2_359_296),
        ("layer.5.dense.bias", 768, 0),
        ("pooler.weight", 589_824, 589_824),
        ("predictions.bias", 30_528, 0),
        ("seq_relationship.weight", 1536, 1536),
        ("seq_relationship.bias", 2, 0),
    ],
)
def test_layers_of_bert_base(name: str, elements: int, operations: float) -> None:
    found = [(each.elements, each.operations) for each in MODELS["BERT-Base"]() if each.name == name]
    assert found == [(elements, operations)]


def test_an_encoder_layer_of_bert_has_sixteen_tensors() -> None:
    one, three = bert(1, 8), bert(3, 8)
    assert len(three) - len(one) == 2 * 16
    assert [each.name for each in bert(1, 8)][5:7] == ["layer.0.query.weight", "layer.0.query.bias"]
