"""Property tests give the same verdict on every machine: the same inputs each time, and no clock decides.

Runs of tests do not queue for this machine: many of them run several at once, and others may be testing here, too.
"""

import atexit
import os
import shutil
import signal
import sys
import tempfile

from hypothesis import HealthCheck, settings

pytest_plugins = ("tests.limits",)

settings.register_profile(
    "repeatable", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")

os.environ.setdefault("MLBENCH_MACHINE_LOCK", "none")
# A test that names no folder of its own must not write into the home of whoever runs the tests.
os.environ["MLBENCH_HOME"] = tempfile.mkdtemp(prefix="mlbench-tests-")
atexit.register(shutil.rmtree, os.environ["MLBENCH_HOME"], ignore_errors=True)

# The programs that tests start keep what they compile, or each of them would compile the whole tool again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell starts what stands before "&" with SIGINT ignored, and whatever the tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
