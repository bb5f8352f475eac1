# A base for Google's machines with RDMA (A3 Ultra, A4): Python with the libraries that NCCL's plugin gIB loads.
#
#   mlbench images push --base gib        BASE=gib task_images/build.sh
#
# The plugin itself is Google's and comes from the machine: create-cluster gke --fast-network brings it there, and runs
# mount it. It loads libibverbs and the driver of ConnectX cards from the image; without them NCCL ends with "Failed to
# open libibverbs.so". GPUDirect-TCPX and TCPXO (A3 High, A3 Mega) take all from the machine and only need glibc 2.35 and
# bash, which the default base has: they have no variant.
# Sources: GoogleCloudPlatform/container-engine-accelerators, gpudirect-rdma and gpudirect-tcpxo/README.md (glibc).
ARG SYSTEM=python:3.12-slim-bookworm
FROM ${SYSTEM}
USER 0
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends libibverbs1 ibverbs-providers librdmacm1 \
 && rm -rf /var/lib/apt/lists/*
