#!/bin/sh
# The same stories on a real Slurm and on real hosts with sshd, all on this machine; with the argument
# tests/e2e/machines also what only one of them can do. Arguments are for pytest.
#
# MACHINES names the program that starts them: `$MACHINES up 3`, `$MACHINES env`, `$MACHINES down`.
set -eu
cd "$(dirname "$0")/../../.."
machines=${MACHINES:-../shared/lab/machines}
[ -x "$machines" ] || { echo "e2e-machines: no program that starts Slurm and hosts: set MACHINES" >&2; exit 2; }
"$machines" up 3
trap '"$machines" down' EXIT
eval "$("$machines" env)"
OMP_NUM_THREADS=1 "${PYTHON:-.venv/bin/python}" -m pytest -q ${*:-tests/e2e/machines/test_both.py}
