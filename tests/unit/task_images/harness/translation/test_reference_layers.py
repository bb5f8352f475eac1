"""The Transformer's layers with the weights of torch's own."""

import math
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from task_images.wmt17_transformer.model import Attention, DecoderLayer, EncoderLayer, Size, Transformer, sinusoids

SIZE = Size(16, 32, 2, 4, 0.0, 0.0, 0.0)
PADDING = 1


def copy_attention(own: Attention, theirs: nn.MultiheadAttention) -> None:
    with torch.no_grad():
        theirs.in_proj_weight.copy_(own.packed)
        theirs.out_proj.weight.copy_(own.out.weight)
        theirs.in_proj_bias.zero_()
        theirs.out_proj.bias.zero_()


def copy_norms(own: list[nn.LayerNorm], theirs: list[Any]) -> None:
    with torch.no_grad():
        for number, (mine, other) in enumerate(zip(own, theirs, strict=True)):
            mine.weight.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(number))
            mine.bias.uniform_(-0.5, 0.5, generator=torch.Generator().manual_seed(number))
            other.weight.copy_(mine.weight)
            other.bias.copy_(mine.bias)


def copy_inner(own: Any, theirs: Any) -> None:
    with torch.no_grad():
        own.up.bias.uniform_(-0.5, 0.5)
        own.down.bias.uniform_(-0.5, 0.5)
        for mine, other in ((own.up, theirs.linear1), (own.down, theirs.linear2)):
            other.weight.copy_(mine.weight)
            other.bias.copy_(mine.bias)


def make_encoder(own: EncoderLayer) -> nn.TransformerEncoderLayer:
    theirs = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True, norm_first=True)
    copy_attention(own.own, theirs.self_attn)
    copy_norms([own.own_norm, own.inner.norm], [theirs.norm1, theirs.norm2])
    copy_inner(own.inner, theirs)
    return theirs


def make_decoder(own: DecoderLayer) -> nn.TransformerDecoderLayer:
    theirs = nn.TransformerDecoderLayer(16, 4, 32, 0.0, batch_first=True, norm_first=True)
    copy_attention(own.own, theirs.self_attn)
    copy_attention(own.attention, theirs.multihead_attn)
    copy_norms([own.own_norm, own.attention_norm, own.inner.norm], [theirs.norm1, theirs.norm2, theirs.norm3])
    copy_inner(own.inner, theirs)
    return theirs


def test_the_whole_model_is_made_of_torchs_pre_norm_layers() -> None:
    torch.manual_seed(0)
    model = Transformer(20, SIZE, PADDING)
    encoders = [make_encoder(cast(EncoderLayer, layer)) for layer in model.encoder]
    decoders = [make_decoder(cast(DecoderLayer, layer)) for layer in model.decoder]
    source = torch.tensor([[5, 6, 7, 8, 2], [9, 4, 2, 1, 1]])
    target = torch.tensor([[2, 7, 8], [2, 4, 9]])

    def embed(words: Tensor) -> Tensor:
        # 1-based places behind the padding's number, as in fairseq.
        marks = sinusoids(range(words.shape[1]), 16, PADDING + 1, torch.device("cpu"))
        return model.embedding[words] * 4.0 + marks

    with torch.no_grad():
        memory = embed(source)
        for encoder in encoders:
            memory = encoder(memory, src_key_padding_mask=source == PADDING)
        memory = model.encoder_norm(memory)
        features = embed(target)
        causal = nn.Transformer.generate_square_subsequent_mask(3)
        for decoder in decoders:
            features = decoder(features, memory, tgt_mask=causal, memory_key_padding_mask=source == PADDING)
        expected = model.decoder_norm(features)
        found = model(source, torch.tensor([5, 3]), target)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.scores(found), found @ model.embedding.T)


def test_marks_of_positions_are_sines_then_cosines_of_falling_frequencies() -> None:
    found = sinusoids(range(3, 6), 8, 2, torch.device("cpu"))
    rates = 10_000.0 ** (-np.arange(4) / 3)
    angles = np.arange(5, 8)[:, None] * rates
    np.testing.assert_allclose(found, np.concatenate([np.sin(angles), np.cos(angles)], 1), rtol=1e-5, atol=1e-6)


def test_weights_begin_as_the_paper_and_fairseq_say() -> None:
    torch.manual_seed(0)
    model = Transformer(300, Size(64, 128, 1, 4), PADDING)
    assert not model.embedding[PADDING].any()
    others = torch.cat([model.embedding[:PADDING], model.embedding[PADDING + 1 :]])
    assert others.std().item() == pytest.approx(64**-0.5, rel=0.02)
    layer = cast(EncoderLayer, model.encoder[0])
    # Xavier's bound: sqrt(6 / (inputs + outputs)), of the packed matrix with three times the outputs.
    for weight, bound in (
        (layer.own.packed, math.sqrt(6 / (64 + 192))),
        (layer.own.out.weight, math.sqrt(6 / 128)),
        (layer.inner.up.weight, math.sqrt(6 / 192)),
        (layer.inner.down.weight, math.sqrt(6 / 192)),
    ):
        assert weight.abs().max().item() == pytest.approx(bound, rel=0.02)
        assert weight.abs().max().item() <= bound
    assert not layer.inner.up.bias.any()
    assert not layer.inner.down.bias.any()


def test_dropout_acts_in_training_alone() -> None:
    torch.manual_seed(0)
    source, target = torch.tensor([[5, 6, 2]]), torch.tensor([[2, 7]])
    for place in range(3):
        size = Size(16, 32, 1, 4, *(0.9 if number == place else 0.0 for number in range(3)))
        model = Transformer(20, size, PADDING).eval()
        lengths = torch.tensor([3])
        assert torch.equal(model(source, lengths, target), model(source, lengths, target))
        model.train()
        assert not torch.equal(model(source, lengths, target), model(source, lengths, target)), place
