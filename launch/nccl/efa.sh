# shellcheck shell=bash
# NCCL over AWS's Elastic Fabric Adapter (p4d, p5, ... with EFA enabled). Source it on every node.
# From AWS's guides, for libfabric 1.18 and aws-ofi-nccl 1.7 or later; not run on several GPUs.
#
# What counts is not a variable: the plugin aws-ofi-nccl must be found (it comes with AWS's images
# and with the EFA installer), the nodes share one subnet, best one placement group, and a security
# group that lets all traffic pass between its members, both ways.

# Where the installer puts the plugin and libfabric, unless ldconfig knows them.
export LD_LIBRARY_PATH="/opt/amazon/ofi-nccl/lib:/opt/amazon/efa/lib:${LD_LIBRARY_PATH:-}"

# Fail if the plugin is not there; else NCCL falls back to TCP and is slow without a word. Newer
# plugins are called "Libfabric", and still answer to the old name (their source, 2026-08).
export NCCL_NET="AWS Libfabric"

# Ranks still meet over TCP: not over lo, and not over docker's bridge.
export NCCL_SOCKET_IFNAME="^lo,docker"

# Huge pages run out when a DataLoader forks its workers ("Cannot allocate memory"). Costs little.
export FI_EFA_USE_HUGE_PAGE=0

# A warning says why a group failed. INFO, for a first run, must say "Selected provider is efa".
export NCCL_DEBUG=WARN

# Do not set:
#   FI_PROVIDER=efa, FI_EFA_USE_DEVICE_RDMA=1, NCCL_PROTO=simple   the plugin chooses; they were
#                        for aws-ofi-nccl 1.5 and 1.6. On cards without RDMA (g5) the second aborts
#   RDMAV_FORK_SAFE=1    breaks newer kernels; from 5.15 on nothing of the kind is needed
#   NCCL_MIN_NCHANNELS, NCCL_BUFFSIZE   smaller pieces starve EFA
#   NCCL_IB_*, NCCL_SOCKET_NTHREADS, NCCL_NSOCKS_PERTHREAD   not for this network: no effect
