# A base for machines with EFA, Amazon's fast network between machines: Python with libfabric and NCCL's plugin for it.
#
#   mlbench images push --base efa        BASE=efa task_images/build.sh
#
# AWS' installer brings libfabric and, since 1.48, the plugin aws-ofi-nccl (in /opt/amazon/ofi-nccl). The kernel's part is
# on the machine. NCCL finds the plugin by LD_LIBRARY_PATH; without cards it falls back to TCP, and the result says so.
# Sources: AWS' guide to EFA and NCCL; aws-samples/awsome-distributed-ai, micro-benchmarks/nccl-tests (EFA 1.48.0, NCCL
# 2.30.4, CUDA 13.0.2). A distribution's own libfabric is too old for the plugin (Debian 12 has 1.17).
ARG SYSTEM=ubuntu:24.04
FROM ${SYSTEM}
ARG EFA=1.48.0
ARG DEBIAN_FRONTEND=noninteractive
USER 0
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates curl python3 python3-pip python3-venv \
 && curl -fsSL "https://efa-installer.amazonaws.com/aws-efa-installer-${EFA}.tar.gz" | tar -xz -C /tmp \
 && cd /tmp/aws-efa-installer \
 && ./efa_installer.sh -y -g -d --skip-kmod --skip-limit-conf --no-verify \
 && rm -rf /tmp/aws-efa-installer /var/lib/apt/lists/*
# Ubuntu's own Python takes no packages of pip.
RUN python3 -m venv /opt/python
ENV PATH=/opt/python/bin:/opt/amazon/efa/bin:${PATH} \
    LD_LIBRARY_PATH=/opt/amazon/efa/lib:/opt/amazon/ofi-nccl/lib:/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu
