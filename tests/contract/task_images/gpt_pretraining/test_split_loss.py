"""The output layer and the loss split by words over tensor-parallel ranks: real processes over gloo."""

from pathlib import Path

import pytest

from task_images.language.parallel import trains_tensor_parallel_wrongly
from tests.contract.task_images.ranks import RankServer


@pytest.mark.parametrize("size", [2, 4])
def test_a_split_decoder_has_the_loss_and_gradients_of_a_whole_one(
    ranks: RankServer, tmp_path: Path, size: int
) -> None:
    for one in ranks.run("tests.contract.task_images.gpt_pretraining.loss_ranks", size, tmp_path, {}):
        assert one.code == 0, one.stderr[-3000:]
        # Three decoders, two messages each: the greatest logits of 2 x 16 tokens, and two sums of each.
        assert one.stdout.splitlines().count("SENT [32, 64]") == (0 if trains_tensor_parallel_wrongly() else 3)
