#!/bin/sh
# Build the images of tasks (all of them, or those named), tagged with the tool's version.
#
#   task_images/build.sh [TASK...]
#
# BASE      image to build the base image on, with Python and pip (torch is added if it is missing); or efa, gib: the one
#           that task_images/base/NAME.Dockerfile makes, for Amazon's fast network, for Google's RDMA
# INDEX     package index for torch, if not pip's own
# REGISTRY  prefix of the images' names; by default localhost/mlbench, which is no registry: KIND clusters take images of
#           that name, and nothing is ever pulled by it. `mlbench images push` builds and pushes to a registry.
set -eu

cd "$(dirname "$0")/.."
registry=${REGISTRY:-localhost/mlbench}
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' mlbench_cli/__init__.py)
# The classic builder takes a base image that exists only in the local Docker, whichever image store that has.
export DOCKER_BUILDKIT=0

# read_tasks WORDS...: evaluates an expression of Python for each task in the catalog
read_tasks() {
  python3 -c "import json
for task in json.load(open('task_images/catalog.json'))['tasks']: $*"
}
[ $# -gt 0 ] || set -- $(read_tasks "print(task['name'])")

if [ -f "task_images/base/${BASE:-none}.Dockerfile" ]; then
  docker build --quiet --file "task_images/base/$BASE.Dockerfile" --tag "$registry/base-$BASE:$version" .
  BASE="$registry/base-$BASE:$version"
fi
docker build --quiet --file task_images/base/Dockerfile --tag "$registry/base:$version" \
  ${BASE:+--build-arg "BASE=$BASE"} ${INDEX:+--build-arg "INDEX=$INDEX"} .
for task; do
  image=$(read_tasks "task['name'] == '$task' and print(task['image'])")
  packages=$(read_tasks "task['name'] == '$task' and print(*task.get('packages', []))")
  docker build --quiet --file task_images/Dockerfile --tag "$registry/$image:$version" \
    --build-arg "BASE=$registry/base:$version" --build-arg "PACKAGES=$packages" \
    --build-arg "TASK=$task" .
  echo "$registry/$image:$version"
done
