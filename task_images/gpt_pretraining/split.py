"""The decoder's layers over tensor-parallel ranks."""

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from task_images.gpt_pretraining.model import Decoder
from task_images.language.parallel import split_layers


def split_decoder(model: Decoder, mesh: DeviceMesh) -> None:
    """Tensor parallel with sequence parallel: matrices are split by heads and channels; what lies between them (norms,
    the residual stream) by positions; output layer and loss by words. Tied embeddings have to be tied again: splitting
    makes two tensors of them."""
    whole, by_position = Replicate(), Shard(1)
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=whole, output_layouts=by_position),
        "output.norm": SequenceParallel(),
        "output.head": ColwiseParallel(input_layouts=by_position),
    }
    for number in range(len(model.blocks)):
        block = f"blocks.{number}"
        plan |= {
            f"{block}.attention_norm": SequenceParallel(),
            f"{block}.attention": PrepareModuleInput(
                input_layouts=(by_position, None, None), desired_input_layouts=(whole, None, None)
            ),
            f"{block}.attention.qkv": ColwiseParallel(),  # whole groups of heads, see Attention
            f"{block}.attention.output": RowwiseParallel(output_layouts=by_position),
            f"{block}.feed_forward_norm": SequenceParallel(),
            f"{block}.feed_forward": PrepareModuleInput(input_layouts=by_position, desired_input_layouts=whole),
            **{f"{block}.feed_forward.{name}": ColwiseParallel() for name in ("gate", "up")},
            f"{block}.feed_forward.down": RowwiseParallel(output_layouts=by_position),
        }
    split_layers(model, mesh, plan)
    model.output.split_over(mesh)
    if model.shape.tied:
        model.output.head.weight = model.embedding.weight
