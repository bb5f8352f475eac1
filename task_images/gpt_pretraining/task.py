"""Pretraining of a decoder: next-token prediction by AdamW, on any layout of ranks, to a loss or for throughput."""

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from task_images.contract import Contract
from task_images.errors import TaskUsageError
from task_images.gpt_pretraining import Settings
from task_images.gpt_pretraining.model import Decoder, count_unused_rows, initial_deviation, join_qkv, split_qkv
from task_images.gpt_pretraining.preflight import Plan, make_plan
from task_images.gpt_pretraining.shapes import FLOPS_FORMULA
from task_images.gpt_pretraining.split import split_decoder
from task_images.language.float8 import require_float8, use_float8
from task_images.language.muon import Muon
from task_images.language.pretraining import Workload
from task_images.language.program import MakeWorkload, Program, require_data_dir
from task_images.language.shards import read_shards
from task_images.language.tokens import (
    Batch,
    Corpus,
    Part,
    Windows,
    batches_of_update,
    python_text,
    read_tokens,
    synthetic_tokens,
    validation_batches,
)
from task_images.loop import Unit
from task_images.methods.base import MakeOptimizer
from task_images.world import World


def main(contract: Contract) -> None:
    """Train a decoder. Raises TaskUsageError for settings that do not go together."""
    Program(
        "gpt_pretraining",
        "a decoder",
        Settings,
        make_plan,
        load,
        make_model=make_model,
        blocks=lambda model: model.blocks,
        compiled=lambda model: (model.output,),
        # Tied tensors belong to both ends, and to no group but the root's.
        apart=lambda model: ((), ()) if model.shape.tied else ((model.embedding,), (model.output,)),
        deviation=lambda plan: partial(initial_deviation, shape=plan.shape),
        split_tensor=split_decoder,
        unused_rows=lambda plan: count_unused_rows(plan.shape),
        goal_metric="loss",
        flops=lambda plan, settings: plan.shape.flops_per_token(settings.sequence_length) * count_tokens(settings),
        formula=FLOPS_FORMULA,
        unit=lambda settings: Unit("tokens", settings.sequence_length),
        make_optimizer=make_optimizer,
        check=check_options,
        details=lambda plan, settings: {
            "documents": settings.documents,
            "loss_chunk": settings.loss_chunk,
            "stream": settings.stream,
            "float8": settings.float8,
            "optimizer": settings.optimizer,
            "vocabulary": plan.shape.vocabulary,
            "padded_vocabulary": plan.shape.padded_vocabulary,
        },
    ).run(contract)


def make_model(plan: Plan, settings: Settings) -> Decoder:
    """The decoder, with 8-bit products where they are asked for."""
    model = Decoder(plan.shape, torch.bfloat16 if settings.stream == "bf16" else None)
    if settings.float8 != "none":
        use_float8([model.output.head, *(model.blocks.modules() if settings.float8 == "all" else ())])
    return model


def check_options(settings: Settings, plan: Plan, world: World) -> None:
    """Raise TaskUsageError for options that do not go together, or that the device does not have."""
    if settings.stream == "bf16" and settings.precision != "bf16":
        raise TaskUsageError("stream=bf16 rounds what an fp32 model adds up", "--set precision=bf16")
    if settings.float8 != "none":
        if settings.parallel != "ddp":
            raise TaskUsageError("8-bit products do not support sharded models", "--set parallel=ddp")
        require_float8(world.device)
    if settings.optimizer == "muon":
        method = world.contract.method
        if settings.parallel != "ddp" or (method and method.get("engine") == "zero1"):
            raise TaskUsageError(
                "Muon needs every rank's whole gradients, but with this layout or method each rank has only a part",
                "--set parallel=ddp without --method, or --method bsp",
            )
    elif settings.matrix_rate:
        raise TaskUsageError("matrix_rate is the rate of Muon", "--set optimizer=muon, or --set matrix_rate=0")


def make_optimizer(settings: Settings, world: World) -> MakeOptimizer | None:
    """What makes the optimizer; None: AdamW with one rate for all."""
    p = settings
    if p.optimizer == "adamw" and not (p.embedding_rate or p.head_rate):
        return None

    def make(model: nn.Module) -> torch.optim.Optimizer:
        assert isinstance(model, Decoder)
        kinds: dict[str, list[nn.Parameter]] = {name: [] for name in ("embedding", "head", "matrix", "vector")}
        for name, parameter in model.named_parameters():
            places = {"embedding.weight": "embedding", "positions.weight": "embedding", "output.head.weight": "head"}
            kinds["vector" if parameter.dim() < 2 else places.get(name, "matrix")].append(parameter)
        rates = {"embedding": p.embedding_rate, "head": p.head_rate, "matrix": p.matrix_rate, "vector": 0.0}
        decays = {"vector": 0.0, "matrix": p.matrix_decay if p.optimizer == "muon" else p.weight_decay}
        groups = [
            {
                "params": members,
                "muon": kind == "matrix" and p.optimizer == "muon",
                "rate_factor": (rates[kind] or p.learning_rate) / p.learning_rate,
                "weight_decay": decays.get(kind, p.weight_decay),
            }
            for kind, members in kinds.items()
            if members
        ]
        shape = model.shape
        cut, join = partial(split_qkv, shape=shape), partial(join_qkv, shape=shape)
        return Muon(
            groups,
            iterations=p.orthogonalization,
            rank=world.rank,
            ranks=world.size,
            splits={value: (cut, join) for name, value in model.named_parameters() if name.endswith("qkv.weight")},
            lr=p.learning_rate,
            betas=(p.beta1, p.beta2),
            eps=p.epsilon,
            fused=True,
        )

    return make


def load(settings: Settings, contract: Contract, plan: Plan) -> tuple[Corpus, MakeWorkload[Batch]]:
    """The tokens that the settings ask for. Raises EnvironmentUnfitError or TaskUsageError."""
    corpus = load_corpus(settings, contract, plan.shape.vocabulary)
    return corpus, lambda world: NextToken(world, plan, settings, corpus)


def load_corpus(settings: Settings, contract: Contract, vocabulary: int) -> Corpus:
    """The tokens that the settings ask for. Raises EnvironmentUnfitError or TaskUsageError."""
    if settings.documents == "separate" and settings.data == "synthetic":
        raise TaskUsageError("synthetic tokens have no documents to keep apart", "--set documents=joined")
    if settings.data == "python-text":
        return python_text()
    if settings.data == "synthetic":
        return synthetic_tokens(vocabulary, settings.synthetic_tokens, contract.seed)
    if settings.data == "shards":
        return read_shards(require_data_dir(contract, "shards"), vocabulary)
    corpus = read_tokens(require_data_dir(contract, "token files"), vocabulary)
    if settings.documents == "separate" and corpus.end is None:
        raise TaskUsageError('tokens.json does not name the end-of-document token ("end")', "--set documents=joined")
    return corpus


def count_tokens(settings: Settings) -> int:
    """Tokens of an update."""
    return settings.global_batch * settings.sequence_length


class NextToken(Workload[Batch]):
    """Windows of tokens; each token is predicted from those before it."""

    def __init__(self, world: World, plan: Plan, settings: Settings, corpus: Corpus) -> None:
        layout = plan.layout
        self._device = world.device
        self._loss_chunk = settings.loss_chunk
        self.samples = settings.global_batch
        self.tokens = count_tokens(settings)
        separate = settings.documents == "separate"
        make = partial(
            Windows, length=settings.sequence_length, seed=world.contract.seed, end=corpus.end, separate=separate
        )
        # In the order of the files, windows follow each other; synthetic tokens and bytes are one row of them.
        in_files = settings.order == "files"
        self._train = make(corpus.rows, block=settings.global_batch if in_files else 0)
        self._valid = make(corpus.valid)
        self.updates_per_epoch = self._train.count / settings.global_batch
        self._most = settings.validation_sequences
        self._part = Part(plan.micro_batch, layout.data_rank(world.rank), layout.data)

    def training(self, update: int) -> Iterator[Batch]:
        """This rank's passes of an update."""
        return batches_of_update(self._train, update, self.samples, self._part)

    def validation(self) -> Iterator[Batch]:
        """This rank's part of the validation windows."""
        return validation_batches(self._valid, self._part, self._most)

    def prepare(self, part: Batch) -> Batch:
        return part.to(self._device)

    def forward(self, model: nn.Module, data: Batch) -> Tensor:
        """The sum of losses: the model computes it, so that it can be compiled together with the output layer."""
        loss: Tensor = model(data.inputs, data.places, data.mask, data.targets, self._loss_chunk)
        return loss

    def sum_loss(self, outputs: Tensor, data: Batch) -> Tensor:
        """Sum of cross-entropies, in nats."""
        return outputs

    def score(self, outputs: Tensor, data: Batch) -> Mapping[str, tuple[Tensor | float, float]]:
        """The mean loss of a pass, with the number of tokens as its weight."""
        return {"loss": (outputs / max(1.0, data.terms), data.terms)}
