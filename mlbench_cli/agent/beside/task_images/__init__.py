"""The tasks of this mlbench, for a program that imports `task_images` in an environment without mlbench."""

import importlib.util
import os
import sys

_folder = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../../../task_images"))
_spec = importlib.util.spec_from_file_location(
    __name__, os.path.join(_folder, "__init__.py"), submodule_search_locations=[_folder]
)
assert _spec is not None
assert _spec.loader is not None
sys.modules[__name__] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules[__name__])
