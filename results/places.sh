#!/bin/sh
# Makes the archives behind the published results: this machine's processes, emulated networks, hosts with sshd, Slurm, KIND.
#
#   results/places.sh local network hosts slurm kind    # or some of them; all but local need root, KIND also Docker
#
# Hosts and Slurm's nodes are this machine, too (tests/e2e/machines/machines.sh), and so is KIND: their archives show that
# these ways work, not how fast they are. Runs go to a data folder of their own, archives to results/archives.
set -eu
cd "$(dirname "$0")/.."
python=$(pwd)/${PYTHON:-.venv/bin/python}
machines=${MACHINES:-tests/e2e/machines/machines.sh}
lab=${LAB:-../shared/lab/lab}
MLBENCH_HOME=$(mktemp -d)
export MLBENCH_HOME OMP_NUM_THREADS=1
mlbench() { "$python" -m mlbench_cli "$@"; }

finish() {
  case "$begun" in *" hosts "* | *" slurm "*) "$machines" down || true ;; esac
  case "$begun" in *" kind "*) mlbench delete-cluster kind results-2 --yes --force || true ;; esac
  rm -rf "$MLBENCH_HOME"
}
begun=" "
trap finish EXIT

# measure NAME OPTION...: three repeats in alternation on two workers
measure() {
  place=$1
  shift
  mlbench run "experiment-$place" 2 --task digits_resnet --preset tiny --repeat 3 --timeout 10m --yes "$@"
}

[ $# -gt 0 ] || { sed -n "2,4p" "$0" >&2; exit 2; }
for place; do
  begun="$begun$place "
  case $place in
    local)
      mlbench run -f results/experiment.yaml --yes
      ;;
    network)
      measure net --matrix method=bsp,eftopk --matrix network=100mbit,1gbit --num-cpus 1
      ;;
    hosts)
      "$machines" up 3
      eval "$("$machines" env)"
      mlbench attach-hosts results-hosts --hosts "$MACHINES_HOSTS" --ssh-config "$MACHINES_SSH_CONFIG" --python "$python" \
        --dir "$MLBENCH_HOME/on-hosts"
      measure hosts --cluster results-hosts --matrix method=bsp,powersgd
      ;;
    slurm)
      "$machines" up 3
      eval "$("$machines" env)"
      mlbench attach-slurm results-slurm --shared "$MACHINES_SHARED" --python "$python"
      measure slurm --cluster results-slurm --matrix method=bsp,fp16
      ;;
    kind)
      if [ -x "$lab" ]; then
        "$lab" torch
        eval "$("$lab" env)"
        export BASE="$LAB_TORCH_IMAGE"
      fi
      sh task_images/build.sh digits_resnet
      version=$("$python" -c "import mlbench_cli; print(mlbench_cli.__version__)")
      mlbench create-cluster kind 2 results --load "localhost/mlbench/digits_resnet:$version" \
        ${LAB_NODE_IMAGE:+--image "$LAB_NODE_IMAGE"}
      measure kind --cluster results-2 --matrix method=bsp,wfbp
      ;;
    *)
      echo "places.sh: $place is none of local, network, hosts, slurm, kind" >&2
      exit 2
      ;;
  esac
done
"$python" -m tools.results collect
