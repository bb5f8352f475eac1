"""A rank of the task in the arguments, which says at its end which modules of task_images it has imported."""

import sys

from task_images.run import start

if __name__ == "__main__":
    try:
        start(sys.argv[1:])
    finally:
        print("imported", *(name for name in sys.modules if name.split(".")[0] == "task_images"), flush=True)
