# shellcheck shell=bash
# NCCL over InfiniBand, or RoCE. Source it on every node:
#     export NODES_NETWORK=ens5 && . nccl/infiniband.sh
# From NVIDIA's documentation; not run on several GPUs.

# The interface that leads to the other nodes (ip -brief address), which no file can know: eth0, ens5
# and enp1s0 are all common, and NCCL does not start with a wrong one.
if [[ ! -e /sys/class/net/${NODES_NETWORK:-none} ]]; then
  echo "NODES_NETWORK=${NODES_NETWORK:-} is none of $(cd /sys/class/net && echo *): export one" >&2
  return 1
fi

# Ranks meet over TCP before they use InfiniBand: this is the network for that. "=" means this one,
# not those whose names begin so.
export NCCL_SOCKET_IFNAME="=$NODES_NETWORK"

# gloo, for groups on CPUs, takes the network of the host's name unless told.
export GLOO_SOCKET_IFNAME="$NODES_NETWORK"

# Only if some of the cards are not for this, but for storage, say: those that are (ibv_devinfo).
# Again "=", or mlx5_1 means mlx5_10 too. NCCL finds which card is near which GPU.
# export NCCL_IB_HCA="=mlx5_0,mlx5_1,mlx5_2,mlx5_3"

# A warning says why a group failed. INFO, for a first run, must say "NET/IB", and "GDRDMA" where
# the card reads the GPU's memory (it needs the nvidia_peermem module, or DMA-BUF).
export NCCL_DEBUG=WARN

# Do not set:
#   NCCL_IB_GID_INDEX    NCCL finds it since 2.21; one copied from another cluster breaks RoCE
#   NCCL_IB_TC, NCCL_IB_SL   traffic class and service level: your network's administrator knows
#   NCCL_IB_TIMEOUT      a longer one hides a bad cable until a collective has hung for minutes
#   NCCL_NET_GDR_LEVEL   NCCL measures distance itself; "SYS" everywhere can be slower
#   NCCL_CROSS_NIC, NCCL_ALGO, NCCL_PROTO   NCCL chooses by topology, size and network
#   NCCL_SOCKET_NTHREADS, NCCL_NSOCKS_PERTHREAD   for TCP: no effect here
