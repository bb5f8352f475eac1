"""The tasks of this mlbench, for programs that import `task_images.contract` in an environment without mlbench."""

import os

__path__ = [os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../../../task_images"))]
