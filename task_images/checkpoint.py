"""Checkpoints: folders from which any number of ranks can resume.

FOLDER/UPDATE/main.pt         what all ranks share: position, clock, goal, state of the task
FOLDER/UPDATE/rank-N.pt       what rank N has of its own: state of its method, losses not yet reported, buffers, random
                              states
FOLDER/UPDATE/__N_0.distcp    model and optimizer (torch.distributed.checkpoint): all of them from rank 0, or of a
                              sharded model each rank's part. Other methods and numbers of ranks can read them

FOLDER/clock-N.json             for restarts: when rank N first began training, by the machine's clock
FOLDER/training-A-N             exists once rank N trains in attempt A

Rank 0 writes main.pt last, and each .pt file is written atomically. A checkpoint is complete when it has main.pt and
the files of as many ranks as that names, all of a run with the same settings. Ranks on several machines may write to
different folders; only a sharded model needs one that all ranks see. Of .pt files only data are unpickled, no code.
"""

import contextlib
import json
import math
import os
import pickle
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils._pytree import tree_map

from task_images.clock import ClockLook, Snapshot
from task_images.contract import CATEGORIES, EnvironmentUnfitError, TaskUsageError
from task_images.data import load_lasting_states, read_lasting_states
from task_images.methods.base import Method
from task_images.world import World

FORM = 5
MAIN, OWN = "main.pt", "rank-{}.pt"
METADATA = ".metadata"  # of torch.distributed.checkpoint
KEPT = 3  # checkpoints for restarts: another rank may be one behind, and the last one may be incomplete

# A rank that writes or reads a whole model alone intends to.
warnings.filterwarnings("ignore", message=".*single process.*", module=r"torch\.distributed\.checkpoint")


class Checkpoints:
    """The checkpoints of a training (`train.Trainer`, or another `Loop`, which is not saved): those that its parameters
    ask for, and those from which the agent starts its ranks again after one was lost."""

    def __init__(self, training: Any) -> None:
        self._training, self._world, contract = training, training.world, training.world.contract
        self._asked: Folder | None = None
        self._behind = Folder(self._world, Path(contract.checkpoint_dir)) if contract.checkpoint_dir else None
        self._again = contract.resume_from if contract.checkpoint_dir else None
        self._is_written = bool(contract.checkpoint_dir) and contract.checkpoint_every is not None
        text = contract.checkpoint_every or "60s"
        self._updates = int(text) if text.isdecimal() else 0  # between two checkpoints, or
        self._seconds = 0.0 if self._updates else float(text[:-1]) * {"s": 1, "m": 60, "h": 3600}[text[-1]]
        self._look, self._due = ClockLook(), math.inf

    def resume(self) -> Snapshot | None:
        """Resume from the checkpoint that the agent or the parameters name, if any; returns its clock. Collective."""
        training, world, again = self._training, self._world, self._again
        if not training.is_saved or not (again or training.plan.resume):
            return None
        begun, place = time.monotonic(), Path(again or training.plan.resume)
        if again:
            share(world, place)
        main = read_main(world, place, {"task": training.name, **training.identity})
        training.method.update = main["update"]
        load_model(place, training.method)
        scale = training.number_format.scale
        if scale and main["loss_scale"]:
            scale.value, scale.good = main["loss_scale"]["value"], main["loss_scale"]["good"]
        self._load_own(read_own(world, place, main), main["ranks"])
        vars(training.schedule).update(main["schedule"])
        position = training.position
        vars(position).update(main["position"])
        if training.goal and main["goal"]:
            training.goal.load_state_dict(main["goal"])
        for name, item in training.states.items():
            item.load_state_dict(main["states"][name])
        training.details["resumed"] = {"epoch": position.epoch - 1, "updates": position.total}
        training.report.say(f"resuming after epoch {position.epoch - 1}, update {position.total}")
        if again:
            training.curve = main["curve"]
            training.report.metric("restore_seconds", time.monotonic() - begun, step=position.total, unit="s")
        return Snapshot(**main["clock"])

    def begin(self, earlier: Snapshot | None) -> Snapshot | None:
        """Record that this rank trains. Returns the clock of the checkpoint, advanced to the seconds since the first
        update of the whole run: time lost since then counts for the run, but not as training."""
        if self._behind is None:
            return earlier
        contract, folder, now = self._world.contract, self._behind.folder, time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)
        clock, begun = folder / f"clock-{contract.rank}.json", now
        try:
            begun = float(json.loads(clock.read_bytes())["monotonic"])
        except (OSError, ValueError, KeyError):
            partial = clock.with_suffix(".partial")
            partial.write_text(json.dumps({"monotonic": now}))
            partial.replace(clock)
        (folder / f"training-{contract.attempt}-{contract.rank}").touch()
        self._due = now + self._seconds
        if earlier is None and begun == now:
            return None
        earlier = earlier or Snapshot(dict.fromkeys(CATEGORIES, 0.0), 0.0, 0.0, 0, 0, 0)
        lost = max(0.0, now - begun - earlier.wall)
        seconds = {**earlier.seconds, "other": earlier.seconds["other"] + lost}
        return replace(earlier, wall=earlier.wall + lost, seconds=seconds)

    def after_update(self) -> None:
        """Write the checkpoints that are due after this update. Collective."""
        training, update = self._training, self._training.position.total
        if not training.is_saved:
            return
        plan = training.plan
        if plan.checkpoint_every and update % plan.checkpoint_every == 0:
            if self._asked is None:
                if is_sharded(training.method) and not plan.checkpoint_dir:
                    raise TaskUsageError(
                        "checkpoints of a sharded model need a folder that all ranks share",
                        "--set checkpoint_dir=/shared/checkpoints",
                    )
                folder = Path(plan.checkpoint_dir or Path(self._world.contract.output_dir, "checkpoints"))
                self._asked = Folder(self._world, folder, keeps_all=bool(plan.checkpoint_dir))
            with training.consensus():
                self._asked.write(update, self._collect())
        if self._behind is None or training.is_done or not self._is_due(update):
            return
        begun = time.monotonic()
        with training.consensus():
            self._behind.write_behind(update, self._collect(is_whole=True))
        blocked, tracker = time.monotonic() - begun, training.tracker
        training.report.metric("checkpoint_seconds", blocked, step=update, seconds=tracker.snapshot().wall, unit="s")

    def wait(self) -> None:
        """Wait for what is still being written: a run whose checkpoints could not be written has no result."""
        if self._behind is not None:
            self._behind.wait()

    def _is_due(self, update: int) -> bool:
        """Whether to write a checkpoint for restarts; by rank 0's clock if they are apart in time. Collective."""
        if self._updates or not self._is_written:
            return self._is_written and update % self._updates == 0
        is_due = self._look.is_past(update, lambda: float(self._world.agree(self._due - time.monotonic())))
        if is_due:
            self._due = time.monotonic() + self._seconds
        return is_due

    def _collect(self, is_whole: bool = False) -> "State":
        """The state for a checkpoint; `is_whole`: rank 0 writes a sharded model, too. Collective, within
        `consensus`."""
        training, method, world = self._training, self._training.method, self._world
        scale, read_sums = training.number_format.scale, getattr(training.work, "read_sums", None)
        main = {
            "identity": {"task": training.name, **training.identity},
            "schedule": {
                key: value for key, value in vars(training.schedule).items() if isinstance(value, int | float)
            },
            "position": asdict(training.position),
            "clock": asdict(training.tracker.snapshot()),
            "goal": training.goal.state_dict() if training.goal else None,
            "states": {name: dict(item.state_dict()) for name, item in training.states.items()},
            "curve": training.curve,
            "loss_scale": asdict(scale) if scale else None,
            "update": method.update,
        }
        own = {
            "method": method.own_state() if world.size > 1 else {},
            "losses": training.losses.state_dict(),
            "buffers": {name: buffer.detach() for name, buffer in training.model.named_buffers()},
            "random": torch.get_rng_state(),
            "streams": read_lasting_states(),
            "sums": None if read_sums is None else read_sums(),
        }
        return State(main, own, collect_model(method, is_whole), is_sharded(method) and not is_whole)

    def _load_own(self, found: Sequence[Mapping[str, Any]], ranks: int) -> None:
        """What this rank had of its own if there are as many ranks as before, else what all had."""
        training, method = self._training, self._training.method
        if ranks != self._world.size:
            methods = [own["method"] for own in found]
            if self._world.size > 1 and all(methods):
                method.load_other_states(methods)
            return
        [own] = found
        if own["method"]:
            method.load_own_state(own["method"])
        training.losses.load_state_dict(own["losses"])
        for name, buffer in training.model.named_buffers():
            buffer.detach().copy_(own["buffers"][name])
        torch.set_rng_state(own["random"])
        load_lasting_states(own["streams"])
        if own["sums"] is not None:
            training.work.load_sums(own["sums"])


# --- writing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """What a rank has for a checkpoint.

    main    written by rank 0, its entry `identity` by all; own: by each rank
    model   model and optimizer, empty on a rank that writes none; is_sharded: each rank writes its part of them
    """

    main: Mapping[str, Any]
    own: Mapping[str, Any]
    model: Mapping[str, Any] = field(default_factory=dict)
    is_sharded: bool = False


class Folder:
    """The checkpoints that this rank writes to `folder`: all stay, or the last one."""

    def __init__(self, world: World, folder: Path, *, keeps_all: bool = False) -> None:
        self._world, self.folder, self._keeps_all = world, folder, keeps_all
        self._written = [] if keeps_all else self._list_earlier()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def write(self, update: int, state: State) -> None:
        """Write the checkpoint of an update, and delete the one before it once all ranks have written theirs.
        Collective."""
        self._write(update, state, self._world.barrier)
        if not self._keeps_all:
            self._world.barrier()
            self._drop_all_but(1)

    def _list_earlier(self) -> list[int]:
        """What this rank wrote here before it was started again."""
        own = OWN.format(self._world.rank)
        return sorted(int(file.parent.name) for file in self.folder.glob(f"*/{own}") if file.parent.name.isdecimal())

    def _write(self, update: int, state: State, meet: Callable[[], None] | None = None) -> None:
        """Write this rank's files; rank 0 writes the last one after a call of `meet`. Raises EnvironmentUnfitError."""
        world, place = self._world, self.folder / str(update)
        settings = {"identity": dict(state.main["identity"]), "ranks": world.size}
        with self._explain_errors(place):
            place.mkdir(parents=True, exist_ok=True)
            if world.is_first:
                for name in (MAIN, METADATA):  # of an earlier run with this folder
                    (place / name).unlink(missing_ok=True)
            save_model(place, state.model, state.is_sharded)
            _write(place / OWN.format(world.rank), {**state.own, **settings})
        if meet is not None:
            meet()
        if world.is_first:
            with self._explain_errors(place):
                _write(place / MAIN, {"form": FORM, **state.main, **settings})
        self._written = [*(known for known in self._written if known != update), update]

    @contextmanager
    def _explain_errors(self, place: Path) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError, CheckpointException) as error:  # torch raises the latter two on a full disk
            for part in place.glob(f"__{self._world.rank}_*.distcp"):
                part.unlink(missing_ok=True)
            raise EnvironmentUnfitError(
                f"the checkpoint {place} cannot be written: {_shorten(error)}", "Free space there, or write none."
            ) from None

    def write_behind(self, update: int, state: State) -> None:
        """Write a checkpoint in a thread, from a copy in host memory: training waits only for the copy, and for the
        checkpoint before if that is still being written. Raises EnvironmentUnfitError if writing that one failed."""
        self.wait()
        main = state.main if self._world.is_first else {"identity": state.main["identity"]}
        copied = State(_copy_to_host(main), _copy_to_host(state.own), _copy_to_host(state.model), state.is_sharded)
        self._thread = threading.Thread(target=self._write_copied, args=(update, copied), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is being written. Raises EnvironmentUnfitError if writing failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _write_copied(self, update: int, state: State) -> None:
        try:
            self._write(update, state)
            self._drop_all_but(KEPT)
        except BaseException as error:  # raised by the next `wait`
            self._error = error

    def _drop_all_but(self, kept: int) -> None:
        rank = self._world.rank
        while len(self._written) > kept:
            place = self.folder / str(self._written.pop(0))
            shared = [place / MAIN, place / METADATA] if rank == 0 else []
            for file in (*shared, place / OWN.format(rank), *place.glob(f"__{rank}_*.distcp")):
                file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # another rank may still have files there
                place.rmdir()


def _copy_to_host(state: Any) -> Any:
    return tree_map(lambda item: item.detach().to("cpu", copy=True) if isinstance(item, Tensor) else item, state)


def _write(path: Path, state: Mapping[str, Any]) -> None:
    with replace_file(path) as file:
        torch.save(dict(state), file)


@contextmanager
def replace_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which replaces `path` once it is on disk; after an error, `path` is unchanged."""
    partial = path.with_name(f".{path.name}")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    partial.replace(path)


# --- reading ----------------------------------------------------------------------------------------------------------


def read_main(world: World, place: Path, expected: Mapping[str, Any]) -> Mapping[str, Any]:
    """What all ranks share in the checkpoint `place`, with tensors on the CPU.

    Raises EnvironmentUnfitError if it is missing or damaged, and TaskUsageError unless its identity has the `expected`
    entries: a training cannot resume with another model size, vocabulary, seed or global batch.
    """
    found = _read(world, place / MAIN)
    if not isinstance(found, dict) or found.get("form") != FORM:
        raise TaskUsageError(f"{place} is not a checkpoint in the form {FORM}", "Use another one.")
    identity = found["identity"]
    for name, value in expected.items():
        if identity.get(name) != value:
            raise TaskUsageError(
                f"{place} was made with {name} = {identity.get(name)!r}, this run has {value!r}",
                "Resume with the parameters of the run that made it; the number of workers may differ.",
            )
    return found


def read_own(world: World, place: Path, main: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What each rank had of its own in the checkpoint `place`, of which `main` was read; of as many ranks as there are
    now, only what this one had. Raises EnvironmentUnfitError if a file is missing, damaged or another run's."""
    ranks: int = main["ranks"]
    found = []
    for rank in [world.rank] if ranks == world.size else range(ranks):
        path = _find_own(place, rank)
        own = _read(world, path)
        if (own["identity"], own["ranks"]) != (main["identity"], ranks):
            raise EnvironmentUnfitError(f"{path} is of another run than {place / MAIN}", "Use an earlier one.")
        found.append(own)
    return found


def _find_own(place: Path, rank: int) -> Path:
    """The file of a rank: in the same folder, or in that rank's output folder, whose name ends with the rank."""
    beside = place / OWN.format(rank)
    if beside.exists():
        return beside
    folder = place.absolute().parent
    output = folder.parent
    if not output.name:
        return beside
    other = output.with_name(output.name.removesuffix("0") + str(rank)) / folder.name / place.name / beside.name
    return other if other.exists() else beside


def _read(world: World, path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (FileNotFoundError, NotADirectoryError):
        raise EnvironmentUnfitError(
            f"rank {world.rank} finds no checkpoint {path}",
            f"Every worker needs the folder with {MAIN} and the files of all ranks.",
        ) from None
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise _make_error(path, error) from None


def _make_error(path: Path, error: BaseException) -> EnvironmentUnfitError:
    return EnvironmentUnfitError(f"{path} cannot be read as a checkpoint: {_shorten(error)}", "Use an earlier one.")


def _shorten(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def share(world: World, place: Path) -> None:
    """Copy rank 0's files of a checkpoint to the machines that lack them. Collective."""
    for name in (MAIN, METADATA, "__0_0.distcp"):
        _share_file(world, place / name)


def _share_file(world: World, path: Path) -> None:
    holders = [rank for rank, (has_it,) in enumerate(world.gather([float(path.exists())])) if has_it]
    if not holders or len(holders) == world.size:
        return
    source = holders[0]
    data = path.read_bytes() if world.rank == source else b""
    size = int(world.max([len(data)])[0])
    content = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
    content = world.broadcast(content.to(world.device if world.backend == "nccl" else "cpu"), source)
    if world.rank not in holders:
        path.parent.mkdir(parents=True, exist_ok=True)
        own = path.with_name(f"{path.name}.{world.rank}")  # another rank of this machine may write the same file
        with replace_file(own) as file:
            file.write(content.cpu().numpy().tobytes())
        own.replace(path)


# --- model and optimizer --------------------------------------------------------------------------------------------


def is_sharded(method: Method) -> bool:
    """Whether each rank has only a part of the model."""
    return method.is_sharded and method.world.size > 1


def collect_model(method: Method, is_whole: bool = False) -> Mapping[str, Any]:
    """Model and optimizer by the names of parameters, on rank 0; of a sharded model each rank's part, unless
    `is_whole`. Collective, within `consensus`."""
    optimizer = method.whole_optimizer()
    if not (method.world.is_first or is_sharded(method)):
        return {}
    options = StateDictOptions(full_state_dict=True, cpu_offload=True) if is_whole and is_sharded(method) else None
    weights, moments = get_state_dict(method.model, optimizer, options=options)
    return {"model": weights, "optimizer": moments} if method.world.is_first or not is_whole else {}


def save_model(place: Path, state: Mapping[str, Any], is_part: bool) -> None:
    """Write what `collect_model` gave. Collective if it is a part."""
    if state:
        save(dict(state), checkpoint_id=str(place), no_dist=not is_part)


def load_model(place: Path, method: Method) -> None:
    """Restore the model and the state of the optimizer from a checkpoint of any method and number of ranks; the
    optimizer's settings stay those of this run and its method. Collective."""
    model, optimizer = method.model, method.whole_optimizer()
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None  # with gradients, torch would not create the state of the optimizer that it is to fill
    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": {"state": moments["state"]}}
    try:
        known = FileSystemReader(place).read_metadata().state_dict_metadata
        kept = state["optimizer"]["state"]  # a parameter that had no gradient so far has none
        for name in [name for name in kept if not any(key.startswith(f"optimizer.state.{name}.") for key in known)]:
            del kept[name]
        load(state, checkpoint_id=str(place), no_dist=not is_sharded(method))
    except (Exception, CheckpointException) as error:  # readers of damaged parts may raise anything
        raise _make_error(place, error) from None
    options = StateDictOptions(strict=False)
    loaded = {**moments, **state["optimizer"]}
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=loaded, options=options)
    for parameter, gradient in gradients:
        parameter.grad = gradient
    method.take_optimizer(optimizer)
    if method.world.size > 1:
        method.take_model()
