"""The networks written for JAX give what the torch modules of the same names give, over NumPy."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from task_images.gpt_pretraining import jax_model
from task_images.gpt_pretraining.model import Decoder, count_unused_rows
from task_images.gpt_pretraining.settings import Settings
from task_images.gpt_pretraining.shapes import SHAPES, Shape
from task_images.harness.errors import TaskUsageError
from task_images.harness.jax_training import JaxModel
from task_images.harness.language.parallel import fill_parameters
from task_images.harness.language.tokens import IGNORED, Batch
from task_images.harness.models.resnet import resnet
from task_images.harness.models.resnet_jax import make_resnet
from tests.unit.task_images.harness.jax_in_numpy import Jax, NumpyRanks


def make_module(depth: int) -> nn.Module:
    """A ResNet in float64 whose norms have something to do."""
    torch.manual_seed(1)
    module = resnet(depth).double()
    with torch.no_grad():
        for name, one in [*module.named_parameters(), *module.named_buffers()]:
            if one.dim() == 1:
                one.copy_(torch.rand(one.shape) + (0.5 if name.endswith(("weight", "var")) else -0.5))
    return module


def draw_images() -> tuple[Tensor, Tensor]:
    return torch.randn(3, 3, 6, 5, generator=torch.Generator().manual_seed(2)).double(), torch.tensor([4, 0, 9])


@pytest.mark.parametrize("depth", [8, 14])
def test_a_resnet_evaluates_with_its_running_statistics(depth: int) -> None:
    module, (images, _) = make_module(depth), draw_images()
    ranks = NumpyRanks()
    found = JaxModel(ranks, module, make_resnet(ranks.jax))(images)
    with torch.no_grad():
        torch.testing.assert_close(found, module.eval()(images))


def test_a_resnet_trains_with_the_statistics_of_its_batch_and_moves_the_running_ones() -> None:
    module, (images, labels) = make_module(8), draw_images()
    ranks = NumpyRanks()
    program = make_resnet(ranks.jax)
    model = JaxModel(ranks, module, program)
    before = {name: values.copy() for name, values in model.buffers.items()}
    inputs = [ranks.take(one) for one in (images, labels)]
    loss, (outputs, buffers) = program.train(model.parameters, model.buffers, *inputs)
    with torch.no_grad():
        expected = module.train()(images)
    torch.testing.assert_close(torch.from_numpy(outputs), expected)
    assert float(loss) == pytest.approx(cross_entropy(expected, labels).item())
    moved = dict(module.named_buffers())
    assert set(buffers) == {name for name in moved if not name.endswith("num_batches_tracked")}
    for name, values in buffers.items():
        torch.testing.assert_close(torch.from_numpy(values), moved[name], msg=name)
        assert np.array_equal(model.buffers[name], before[name])  # JAX's functions change nothing in place


def test_a_batch_of_images_counts_with_its_size() -> None:
    program = make_resnet(Jax())
    data = draw_images()
    assert program.unpack(data) == (data, 1.0, 3.0)


SMALL = Shape(50, 8, 16, 2, 4, 2, 24, theta=500.0, eps=1e-3)


@pytest.mark.parametrize(
    "shape",
    [
        SMALL,
        replace(SMALL, tied=True),
        replace(SMALL, multiple=32),
        replace(SMALL, tied=True, multiple=32),
        replace(SMALL, kv_heads=4, layers=1),
        replace(SMALL, kv_heads=1, heads=2, theta=10_000.0),
    ],
    ids=["llama", "tied", "padded", "tied and padded", "a key per head", "one key"],
)
def test_a_decoder_has_the_loss_of_the_torch_module(shape: Shape) -> None:
    model = Decoder(shape)
    fill_parameters(model, lambda name: 0.3, 1, count_unused_rows(shape))
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(shape.vocabulary, (2, 7), generator=generator)
    targets = torch.randint(shape.vocabulary, (2, 7), generator=generator)
    targets[0, 2] = targets[1, 6] = IGNORED
    with torch.no_grad():
        logits = model(tokens).flatten(0, 1)
        expected = cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum").item()
    jax: Any = Jax()
    program = jax_model.make_decoder(shape, Settings(), 1)(jax)
    parameters = {name: one.detach().numpy() for name, one in model.named_parameters()}
    given = (parameters, {"buffer": 1}, tokens.numpy(), targets.numpy())
    assert float(program.evaluate(*given)) == pytest.approx(expected, rel=2e-5)
    loss, (reported, buffers) = program.train(*given)
    assert float(loss) == float(reported) == pytest.approx(expected, rel=2e-5)
    assert buffers == {"buffer": 1}


@pytest.mark.parametrize(("terms", "shares", "weight"), [(96.0, 1, 96.0), (96.0, 8, 12.0)])
def test_a_pass_counts_with_its_share_of_the_updates_targets(terms: float, shares: int, weight: float) -> None:
    program = jax_model.make_decoder(SMALL, Settings(), shares)(Jax())
    inputs, targets = torch.zeros(2, 3), torch.ones(2, 3)
    (first, second), divisor, own = program.unpack(Batch(inputs, targets, None, None, terms))
    assert first is inputs
    assert second is targets
    assert (divisor, own) == (weight, weight)


@pytest.mark.parametrize(
    ("changes", "what", "instead"),
    [
        ({"parallel": "fsdp2"}, "parallel=fsdp2", "--set parallel=ddp"),
        ({"documents": "separate"}, "documents=separate", "--set documents=joined"),
        ({"float8": "head"}, "float8", "--set float8=none"),
        ({"resume": "x.pt"}, "these checkpoints", "Leave out resume and checkpoint_every."),
        ({"checkpoint_every": 5}, "these checkpoints", "Leave out resume and checkpoint_every."),
    ],
)
def test_settings_that_jax_lacks_are_refused(changes: dict[str, Any], what: str, instead: str) -> None:
    with pytest.raises(TaskUsageError, match=f"the backend jax does not have {what}") as error:
        jax_model.make_decoder(SMALL, replace(Settings(), **changes), 1)
    assert error.value.hint == instead


@pytest.mark.parametrize(
    "changes",
    [
        {"norm": "layer"},
        {"positions": "learned"},
        {"positions": "half-rotary"},
        {"activation": "gelu"},
        {"bias": True},
        {"qk_norm": True},
        {"embedding_norm": True},
        {"softcap": 15.0},
        {"scale": 0.12},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_decoders_of_another_form_than_llamas_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(TaskUsageError, match="does not have this model") as error:
        jax_model.make_decoder(replace(SMALL, **changes), Settings(), 1)
    assert error.value.hint == "--set model=tiny"


def test_the_models_that_jax_takes() -> None:
    taken = []
    for name, shape in SHAPES.items():
        try:
            jax_model.make_decoder(shape, Settings(), 1)
            taken.append(name)
        except TaskUsageError:
            continue
    assert taken == ["tiny", "1B", "8B"]
