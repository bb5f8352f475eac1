#!/bin/sh
# Prove that a container on a worker node can use its GPUs. The facts found go, as lines of NAME=VALUE, to the pod's
# termination message. POSIX sh; the image needs glibc, and Python with torch for the second half.
set -u
report=${MLBENCH_TERMINATION_LOG:-/dev/termination-log}

# GKE mounts the driver here and sets no variable; in a container on EKS the folder does not exist.
driver=${MLBENCH_DRIVER_DIR:-/usr/local/nvidia}
if [ -d "$driver/lib64" ]; then
  export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$driver/lib64" PATH="$PATH:$driver/bin"
fi

fail() { # REASON
  echo "error=$(printf '%s' "$1" | tr '\n' ' ' | tail -c 1500)" >>"$report"
  exit 1
}

first=$(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>&1) || fail "nvidia-smi: $first"
count=$(printf '%s\n' "$first" | wc -l | tr -d ' ')
first=$(printf '%s\n' "$first" | head -n 1)
{
  echo "gpu=$(printf '%s' "$first" | cut -d, -f1)"
  echo "driver=$(printf '%s' "$first" | cut -d, -f2 | tr -d ' ')"
  echo "memory=$(printf '%s' "$first" | cut -d, -f3 | sed 's/^ *//')"
  echo "gpus=$count"
} >>"$report"
[ "$count" -ge "${MLBENCH_PROBE_GPUS:-1}" ] || fail "the container sees $count of ${MLBENCH_PROBE_GPUS} GPUs"

command -v python >/dev/null && python -c 'import torch' 2>/dev/null || exit 0
# torch.cuda.is_available() may say yes although the first kernel fails, so run one, and a collective over all GPUs.
said=$(python - <<'PYTHON' 2>&1
import os
import tempfile

size = int(os.environ.get("MLBENCH_PROBE_GPUS", "1"))
store = tempfile.mkdtemp() + "/store"
children = []
for rank in range(size):
    child = os.fork()
    if not child:
        import torch
        import torch.distributed as dist

        torch.cuda.set_device(rank)
        ones = torch.ones(9, device="cuda")
        assert (ones @ ones).item() == 9
        dist.init_process_group("nccl", init_method="file://" + store, rank=rank, world_size=size)
        dist.all_reduce(ones)
        assert ones[0].item() == size
        if not rank:
            print("PROBED", torch.__version__, torch.version.cuda, flush=True)
        os._exit(0)
    children.append(child)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
raise SystemExit(max(map(abs, codes)))
PYTHON
) || fail "torch: $said"
# shellcheck disable=SC2086
set -- ${said##*PROBED }
echo "torch=$1" >>"$report"
echo "cuda=$2" >>"$report"
