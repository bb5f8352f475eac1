#!/bin/sh
# Makes the archives behind the published results: this machine's processes, emulated networks, hosts with sshd, Slurm, KIND.
#
#   results/places.sh local network hosts slurm kind certify    # or some of them; all but local need root, KIND also Docker
#
# Hosts and Slurm's nodes are this machine, too (tests/e2e/machines/machines.sh), and so is KIND: their archives show that
# these ways work, not how fast they are. Each place has its own data folder, and its archives replace those in
# results/archives as soon as its runs have ended, even if another place fails.
set -eu
cd "$(dirname "$0")/.."
python=$(pwd)/${PYTHON:-.venv/bin/python}
machines=${MACHINES:-tests/e2e/machines/machines.sh}
lab=${LAB:-../shared/lab/lab}
export OMP_NUM_THREADS=1
mlbench() { "$python" -m mlbench_cli "$@"; }

# measure NAME OPTION...: three repeats, unless it says more, in alternation on two workers
measure() {
  place=$1
  shift
  mlbench run "experiment-$place" 2 --task digits_resnet --preset tiny --repeat 3 --timeout 10m --anonymous --yes "$@"
}

# run_at PLACE: its runs, then their archives; what it has started ends with it
run_at() {
  case $1 in
    local)
      mlbench run -f results/experiment.yaml --yes
      ;;
    network)
      measure net --repeat 5 --matrix method=bsp,eftopk --matrix network=100mbit,1gbit --num-cpus 1
      ;;
    hosts)
      trap '"$machines" down || true' EXIT
      "$machines" up 3
      eval "$("$machines" env)"
      mlbench attach-hosts results-hosts --hosts "$MACHINES_HOSTS" --ssh-config "$MACHINES_SSH_CONFIG" --python "$python" \
        --dir "$MLBENCH_HOME/on-hosts"
      measure hosts --cluster results-hosts --matrix method=bsp,powersgd
      ;;
    slurm)
      trap '"$machines" down || true' EXIT
      "$machines" up 3
      eval "$("$machines" env)"
      # Runs of an earlier time are still in the shared folder.
      mlbench attach-slurm results-slurm --shared "$(mktemp -d "$MACHINES_SHARED/results-XXXXXX")" --python "$python"
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
      trap 'mlbench delete-cluster kind results-2 --yes --force || true' EXIT
      mlbench create-cluster kind 2 results --load "localhost/mlbench/digits_resnet:$version" \
        ${LAB_NODE_IMAGE:+--image "$LAB_NODE_IMAGE"}
      measure kind --cluster results-2 --matrix method=bsp,wfbp
      ;;
    certify)
      certify() { mlbench run certify 5 --task certify --anonymous --share-machine --yes --num-cpus 1 "$@"; }
      certify --set confirm_seconds=600 --network 100mbit,1ms
      mlbench certify --from certify-5 --to results/certificates/healthy || true # says by its exit code what it found
      mlbench delete certify-5 --yes
      certify --preset tiny --set confirm_seconds=400 --set stages=drift,pairs,collectives,training \
        --network 50mbit,1ms --faults 'at 0s link 1 35mbit'
      mlbench certify --from certify-5 --to results/certificates/slow-network || true
      return
      ;;
    *)
      echo "places.sh: $1 is none of local, network, hosts, slurm, kind, certify" >&2
      exit 2
      ;;
  esac
  "$python" -m tools.results collect
}

[ $# -gt 0 ] || { sed -n "2,4p" "$0" >&2; exit 2; }
failed=
for place; do
  MLBENCH_HOME=$(mktemp -d)
  export MLBENCH_HOME
  set +e
  (set -e; trap 'exit 130' INT TERM; run_at "$place")
  code=$?
  set -e
  rm -rf "$MLBENCH_HOME"
  [ $code -ne 130 ] || exit 130
  [ $code -eq 0 ] || failed="$failed $place"
done
[ -z "$failed" ] || { echo "places.sh: no new archives of$failed" >&2; exit 1; }
