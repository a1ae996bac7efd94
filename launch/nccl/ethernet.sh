# shellcheck shell=bash
# NCCL over TCP: a cloud or a cluster without InfiniBand and without EFA. Source it on every node:
#     export NODES_NETWORK=ens5 && . nccl/ethernet.sh
# From NVIDIA's documentation; not run on several GPUs.

# The interface that leads to the other nodes (ip -brief address), which no file can know: eth0, ens5
# and enp1s0 are all common, and NCCL does not start with a wrong one.
if [[ ! -e /sys/class/net/${NODES_NETWORK:-none} ]]; then
  echo "NODES_NETWORK=${NODES_NETWORK:-} is none of $(cd /sys/class/net && echo *): export one" >&2
  return 1
fi

# "=" means this one, not those whose names begin so. NCCL's own guess suffices, and needs no file,
# where there is but one besides lo and docker0.
export NCCL_SOCKET_IFNAME="=$NODES_NETWORK"

# gloo, for groups on CPUs (checkpoints, DataLoader's seeds), takes the network of the host's name.
export GLOO_SOCKET_IFNAME="$NODES_NETWORK"

# A warning says why a group failed, and costs nothing. INFO, for a first run, names the network.
export NCCL_DEBUG=WARN

# At 100 Gb/s one TCP stream is too slow: 4 threads with 4 sockets each (at most 64 in all). They
# cost CPU time, so leave this out at 25 Gb/s and less.
# export NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4

# Do not set:
#   NCCL_IB_DISABLE=1    needless: NCCL takes TCP where it finds no card; and once there is one, this
#                        line, forgotten, keeps NCCL from it
#   NCCL_P2P_DISABLE=1   sends through host memory what NVLink or PCIe carries inside a node
#   NCCL_SHM_DISABLE=1   sends through the network what host memory carries inside a node
#   NCCL_ALGO, NCCL_PROTO, NCCL_MIN_NCHANNELS   NCCL chooses by size and by network
