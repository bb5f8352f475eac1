"""Run a task with every wait of the host for the GPU shown as a warning: the parameter `module` names it."""

import json
import os
import runpy
import sys

import torch

if __name__ == "__main__":
    parameters = json.loads(os.environ["MLBENCH_PARAMETERS"])
    module = parameters.pop("module")
    os.environ["MLBENCH_PARAMETERS"] = json.dumps(parameters)
    torch.cuda.set_sync_debug_mode("warn")
    name, *sys.argv[1:] = module.split()
    runpy.run_module(name, run_name="__main__", alter_sys=True)
