"""A wall clock that a test may set: for the processes that it starts, by a library that they load first."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.needs import missing

SOURCE = Path(__file__).parent / "clock_shim.c"


class ClockShift:
    """`variables` are for the processes whose wall clock `step` shifts; their monotonic clock stays."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc")
        if compiler is None or not sys.platform.startswith("linux"):
            missing("no C compiler (cc) on Linux, which makes the library that shifts the clock")
        library = folder / "clock_shim.so"
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE], check=True)
        self.library = library
        self.link = folder / "clock-shift"
        self.variables = {"LD_PRELOAD": str(library), "CLOCK_SHIFT": str(self.link)}

    def step(self, seconds: float) -> None:
        """Set the wall clock of the processes by so much from what it would be."""
        os.symlink(str(seconds), self.link)
