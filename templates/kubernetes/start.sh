#!/bin/sh
# Starts the agent of a pod, or the head of a run ("head"), with the Python of the image: any from 3.9 on. An image
# without one runs the worker's command itself; then log and exit code are all that comes home, through the API.
set -u

mount=${MLBENCH_MOUNT:-/mlbench}
code=$MLBENCH_WORK_DIR/code
role=$1
shift

add_libraries() { # FOLDER; last, so that the image's own libraries go first
  [ -d "$1" ] || return 0
  case ":${LD_LIBRARY_PATH:-}:" in
    *":$1:"*) ;;
    *) export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$1" ;;
  esac
}

if [ "$role" = node ]; then
  # GKE mounts the driver here and sets no variable.
  driver=${MLBENCH_DRIVER_DIR:-/usr/local/nvidia}
  add_libraries "$driver/lib64"
  [ ! -d "$driver/lib64" ] || export PATH="$PATH:$driver/bin"
  # Libraries of the machine's fast network, and NCCL's settings for it, a script for bash. What the run sets goes first.
  add_libraries "${MLBENCH_FABRIC_LIBRARIES:-}"
  if [ -r "${MLBENCH_NCCL_PROFILE:-}" ] && command -v bash >/dev/null 2>&1; then
    settings=$(bash --posix -c '. "$1" >/dev/null 2>&1; export -p' bash "$MLBENCH_NCCL_PROFILE")
    while IFS= read -r line; do
      case $line in 'export NCCL_DEBUG'*) continue ;; 'export NCCL_'*=*) ;; *) continue ;; esac
      name=${line#export }
      name=${name%%=*}
      eval "[ -n \"\${$name+given}\" ]" || eval "$line"
    done <<END
$settings
END
  fi
fi

boot='import hashlib, io, os, sys, tarfile
packed = open(sys.argv[1], "rb").read()
if hashlib.sha256(packed).hexdigest() != os.environ["MLBENCH_CODE"]:
    sys.exit(f"The code in {sys.argv[1]} is not that of this run.")
tarfile.open(fileobj=io.BytesIO(packed)).extractall(sys.argv[2]); sys.path.insert(0, sys.argv[2])
from mlbench_cli.agent.pod import main; sys.exit(main(sys.argv[3:]))'
for python in python3 python ''; do
  [ -z "$python" ] || ! "$python" -I -S -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2>/dev/null || break
done
[ -z "$python" ] || exec "$python" -I -S -c "$boot" "$mount/code.tar.gz" "$code" "$role"

if [ "$role" = head ]; then
  reason="the image has no Python 3.9 or later"
  echo "$reason"
  echo "$reason" >"${MLBENCH_TERMINATION_LOG:-/dev/termination-log}"
  exit 0
fi
if [ "$LOCAL_WORLD_SIZE" -gt 1 ]; then
  echo "Several processes per worker need an image with Python 3.9 or later."
  exit 126
fi
export NODE_RANK="${JOB_COMPLETION_INDEX:-0}" LOCAL_RANK=0
export RANK="$NODE_RANK" MLBENCH_OUTPUT_DIR="$MLBENCH_WORK_DIR/output"
mkdir -p "$MLBENCH_OUTPUT_DIR"
exec "$@"
