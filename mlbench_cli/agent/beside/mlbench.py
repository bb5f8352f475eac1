"""`from mlbench import emit` in a program of the user, whatever its environment has installed.

This folder is on the PYTHONPATH of the ranks of a user's command. Any Python 3.8 or later can import it.
"""

import importlib.util
import os

_path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "..", "task_images", "contract.py")
_spec = importlib.util.spec_from_file_location("mlbench_contract", os.path.normpath(_path))
assert _spec is not None
assert _spec.loader is not None
_contract = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_contract)

emit = _contract.emit
Contract = _contract.Contract
__all__ = ["Contract", "emit"]
