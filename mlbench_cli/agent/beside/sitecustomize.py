"""Let a rank print the stacks of its threads when the agent asks for them, and report whether it has joined a process
group of torch; then load the user's own sitecustomize.

Any Python 3.8 or later can import it. `faulthandler` writes to standard error, also while a thread is blocked in C.
Only modules that are built in or frozen are imported, since one of the user's folder may have the name of any other.
"""

import _frozen_importlib as importing
import _frozen_importlib_external as finding
import _signal as signal  # type: ignore[import-not-found]  # not in mypy's stubs
import atexit
import faulthandler
import os
import sys
import time

_number = int(os.environ.get("MLBENCH_STACKS_SIGNAL", "0"))
if _number and signal.getsignal(_number) == signal.SIG_DFL:
    try:  # noqa: SIM105 - contextlib is not frozen
        faulthandler.register(_number, all_threads=True)
    except (OSError, RuntimeError, ValueError):  # no standard error
        pass

_log = os.environ.get("MLBENCH_RANK_LOG", "")
_OTHER_MEANS = ("horovod", "jax", "ray", "torch_xla")  # by which ranks train together without a process group of torch
# Children that may have joined a group, which they cannot report: those of multiprocessing run no atexit functions.
_forks = []  # type: list[str]


def _note_fork():
    # type: () -> None
    frame = sys._getframe(1)
    while not frame.f_code.co_filename.endswith("/torch/utils/data/dataloader.py"):
        if frame.f_back is None:
            _forks.append(frame.f_code.co_filename)
            return
        frame = frame.f_back


def _report_group():
    # type: () -> None
    """Write into the log of the rank, by an event, whether this process has ever joined others in a process group.

    Events of all processes of a rank are merged, so the two answers have names of their own."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    has_hook = getattr(sys.excepthook, "__name__", "") == "_distributed_excepthook"
    # What the beginning of a group sets. Its end resets the second one, and a store of one's own leaves out the first.
    has_joined = module is not None and (
        getattr(module, "_default_pg_init_method", None) is not None
        or getattr(getattr(module, "_world", None), "group_count", 0) > 0
        or has_hook
    )
    if "torch" not in sys.modules:
        return
    if module is not None and has_joined and module.is_initialized():
        has_joined = module.get_world_size() > 1
    # The hook marks what it prints with the rank in the group, which the group's end does not change.
    marks = [cell.cell_contents for cell in sys.excepthook.__closure__ or ()] if has_hook else []
    is_unknown = _forks or any(name in sys.modules for name in _OTHER_MEANS)
    joined = '"process_group":"joined"' + (',"leads":true' if "[rank0]" in marks else "")
    fact = joined if has_joined else '"process_group":"unknown"' if is_unknown else '"alone":true'
    line = '@mlbench {"v":1,"event":"environment","rank":%s,"time":%.3f,%s}\n'
    line %= os.path.basename(_log)[len("rank-") : -len(".log")], time.time(), fact
    try:
        with open(_log, "r+b", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            has_open_line = file.read(1) not in (b"", b"\n")
        with open(_log, "ab", buffering=0) as file:
            file.write(("\n" if has_open_line else "").encode() + line.encode())
    except OSError:  # as in a container without that folder
        pass


if _log and hasattr(os, "register_at_fork"):  # not in Python 3.6
    atexit.register(_report_group)
    os.register_at_fork(after_in_parent=_note_fork)

_own = os.path.dirname(os.path.abspath(__file__))
_others = [_entry for _entry in sys.path if os.path.abspath(_entry) != _own]
_spec = finding.PathFinder.find_spec("sitecustomize", _others)
if _spec is not None and _spec.loader is not None:
    _module = importing.module_from_spec(_spec)
    sys.modules["sitecustomize"] = _module
    _spec.loader.exec_module(_module)
