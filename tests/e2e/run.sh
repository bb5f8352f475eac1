#!/bin/sh
# The whole story on a KIND cluster of its own: build two images, make the cluster, run the tests, delete it.
# Arguments are for pytest instead: `run.sh tests/e2e` runs all that needs a cluster, with faults and half-made clusters.
#
# Needs Docker and kind. Where nothing can be pulled, a program that builds kind's node image and a base image with
# torch from packages may stand in: LAB names it (`$LAB torch` builds, `$LAB env` prints PATH and LAB_*_IMAGE).
#
# BASE                    base image of the tasks (task_images/build.sh)
# MLBENCH_TEST_NODE_IMAGE  node image, if not kind's own
# MLBENCH_TEST_LOAD_IMAGE  an image with a shell, for the tests of providers
set -eu
HELM_VERSION=v3.19.5

cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
lab=${LAB:-../shared/lab/lab}

# Go, which builds what is not there, where its own archive puts it: not every shell has that on its path.
command -v go >/dev/null || PATH=$PATH:/usr/local/go/bin

if [ -x "$lab" ]; then
  "$lab" torch
  eval "$("$lab" env)"
  : "${BASE:=$LAB_TORCH_IMAGE}" "${MLBENCH_TEST_NODE_IMAGE:=$LAB_NODE_IMAGE}" "${MLBENCH_TEST_LOAD_IMAGE:=$LAB_TEST_IMAGE}"
  export BASE MLBENCH_TEST_NODE_IMAGE MLBENCH_TEST_LOAD_IMAGE
fi
for tool in docker kind; do
  command -v "$tool" >/dev/null || { echo "e2e: $tool is not on the path" >&2; exit 2; }
done
docker info >/dev/null 2>&1 || { echo "e2e: no Docker engine answers" >&2; exit 2; }

# Each node takes some 40 inotify instances; of the usual 128 there are none left for a second cluster's kubelet.
limit=/proc/sys/fs/inotify/max_user_instances
if [ -w "$limit" ] && [ "$(cat "$limit")" -lt 1024 ]; then echo 1024 >"$limit"; fi

# helm, for charts: if there is none and Go can build it, it is built once.
if ! command -v helm >/dev/null && command -v go >/dev/null; then
  tools=${XDG_CACHE_HOME:-$HOME/.cache}/mlbench-e2e/helm-$HELM_VERSION
  [ -x "$tools/helm" ] || GOBIN=$tools go install "helm.sh/helm/v3/cmd/helm@$HELM_VERSION"
  PATH=$PATH:$tools
fi

sh task_images/build.sh allreduce digits_resnet
[ $# -gt 0 ] || set -- tests/e2e/test_story.py tests/e2e/test_language.py \
  tests/e2e/test_gke_story.py tests/e2e/test_eks_story.py \
  tests/e2e/test_helm_charts.py::test_from_a_repository_to_a_removal_that_leaves_nothing
exec "$python" -m pytest -m cluster "$@"
