#!/bin/sh
# The same stories on a real Slurm and on real hosts with sshd, all on this machine; with the argument
# tests/e2e/machines also what only one of them can do. Arguments are for pytest. It becomes root with sudo.
#
# MACHINES names another program that starts them: `$MACHINES up 3`, `$MACHINES env`, `$MACHINES down`.
set -eu
[ "$(id -u)" = 0 ] || exec sudo --preserve-env=MACHINES,MACHINES_STATE,MACHINES_PORT,PYTHON env "PATH=$PATH" sh "$0" "$@"
cd "$(dirname "$0")/../../.."
machines=${MACHINES:-tests/e2e/machines/machines.sh}
[ -x "$machines" ] || { echo "e2e-machines: $machines is no program that starts Slurm and hosts: set MACHINES" >&2; exit 2; }
trap '"$machines" down' EXIT
trap 'exit 130' INT  # dash leaves without the trap above otherwise
trap 'exit 143' TERM
"$machines" up 3
eval "$("$machines" env)"
OMP_NUM_THREADS=1 "${PYTHON:-.venv/bin/python}" -m pytest -q ${*:-tests/e2e/machines/test_both.py}
