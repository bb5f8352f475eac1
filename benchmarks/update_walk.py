"""How far the reader of one update has to walk: files, functions and changes of file of rank 0, and imported modules.

    .venv/bin/python -m benchmarks.update_walk [TASK [METHOD]]        # digits_resnet, the task's own method

Two ranks train the preset tiny; one update of rank 0 is traced, and every call that leads into another file of
task_images counts as a change of file. A call that a line makes again and again without another change in between,
such as the hook of each parameter, counts once; `distinct` counts each way from a file to a function of another once.
Calls of other threads (of methods that compress) count, too.
"""

import itertools
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from task_images.contract import Contract

ROOT = Path(__file__).parents[1]
TRACED = 7  # update


def trace(task: str) -> None:
    """Be a rank of the task, and print what the traced update of rank 0 walked through."""
    from task_images.run import find_in, find_package
    from task_images.train import Loop

    calls: list[tuple[str, int, str, str]] = []  # file and line of the caller; file and function of the called
    own = str(ROOT / "task_images") + os.sep

    is_on = threading.Event()
    threading.setprofile(lambda frame, event, word: note(frame, event, word) if is_on.is_set() else None)

    def note(frame: FrameType, event: str, _: Any) -> None:
        back = frame.f_back
        while back is not None and not back.f_code.co_filename.startswith(own):
            back = back.f_back
        if event == "call" and frame.f_code.co_filename.startswith(own):
            place = (back.f_code.co_filename, back.f_lineno) if back else ("", 0)
            calls.append((*place, frame.f_code.co_filename, frame.f_code.co_qualname))

    step = Loop._step

    def traced(loop: Any, *words: Any) -> int:
        if loop.position.total + 1 != TRACED or loop.world.rank:
            return step(loop, *words)
        is_on.set()
        sys.setprofile(note)
        try:
            return step(loop, *words)
        finally:
            sys.setprofile(None)
            is_on.clear()
            files = {called for _, _, called, _ in calls}
            changes = [call for call in calls if call[0] != call[2]]
            found = {
                "files": len(files),
                "functions": len({call[2:] for call in calls}),
                "calls": len(calls),
                "changes": sum(1 for _ in itertools.groupby(changes)),
                "distinct": len({(caller, *called) for caller, _, *called in changes}),
                "imported": sum(name.split(".")[0] == "task_images" for name in sys.modules),
            }
            names = sorted(Path(name).relative_to(own).as_posix() for name in files)
            sys.stderr.write(f"{json.dumps(found)}\n{' '.join(names)}\n")

    setattr(Loop, "_step", traced)  # noqa: B010
    find_in(find_package(task), "main", "", "task")(Contract())


def main(task: str = "digits_resnet", method: str = "") -> None:
    """Run two ranks."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    tasks = json.loads((ROOT / "task_images" / "catalog.json").read_text())["tasks"]
    tiny = next(one for one in tasks if one["name"] == task)["presets"]["tiny"]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    shared |= {"MLBENCH_PARAMETERS": json.dumps({**tiny, **({"steps": 8} if "steps" in tiny else {"epochs": 1})})}
    shared |= {"MLBENCH_METHOD": json.dumps({"name": method})} if method else {}
    words = [sys.executable, "-m", "benchmarks.update_walk", "--rank", task]
    ranks = [
        subprocess.Popen(
            words, env={**os.environ, **shared, "RANK": rank, "LOCAL_RANK": rank}, stdout=subprocess.DEVNULL
        )
        for rank in ("0", "1")
    ]
    sys.exit(max(abs(rank.wait()) for rank in ranks))


if __name__ == "__main__":
    trace(sys.argv[2]) if sys.argv[1:2] == ["--rank"] else main(*sys.argv[1:])
