"""Let a rank print the stacks of its threads when the agent asks for them, then load the user's own sitecustomize.

Any Python 3.8 or later can import it. `faulthandler` writes to standard error, also while a thread is blocked in C.
Only modules that are built in or frozen are imported, since one of the user's folder may have the name of any other.
"""

import _frozen_importlib as importing
import _frozen_importlib_external as finding
import _signal as signal  # type: ignore[import-not-found]  # not in mypy's stubs
import faulthandler
import os
import sys

_number = int(os.environ.get("MLBENCH_STACKS_SIGNAL", "0"))
if _number and signal.getsignal(_number) == signal.SIG_DFL:
    try:  # noqa: SIM105 - contextlib is not frozen
        faulthandler.register(_number, all_threads=True)
    except (OSError, RuntimeError, ValueError):  # no standard error
        pass

_own = os.path.dirname(os.path.abspath(__file__))
_others = [_entry for _entry in sys.path if os.path.abspath(_entry) != _own]
_spec = finding.PathFinder.find_spec("sitecustomize", _others)
if _spec is not None and _spec.loader is not None:
    _module = importing.module_from_spec(_spec)
    sys.modules["sitecustomize"] = _module
    _spec.loader.exec_module(_module)
