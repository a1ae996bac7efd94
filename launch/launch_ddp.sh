#!/usr/bin/env bash
# Start a training script under torchrun: on this machine, or on several, one line for all of them.
#
#     launch_ddp.sh train.py --its-own flags               # one rank per GPU; without GPUs, 2
#     CUDA_VISIBLE_DEVICES=0,1 launch_ddp.sh train.py      # one per GPU of these; none: on the CPU
#     launch_ddp.sh --ranks 4 train.py                     # so many ranks on this machine
#     launch_ddp.sh --nodes 2 --head 10.0.0.1 train.py     # the same on both, at about the same time
#     launch_ddp.sh --max-restarts 3 train.py              # if a rank dies, all start anew, 3 times
#     launch_ddp.sh --nodes 1:2 --head 10.0.0.1 --max-restarts 9 train.py  # goes on with one of two
#
# With --nodes 1:2 a node that dies costs one restart: the others go on without it, after 30 seconds
# in which it may come back, and take it in again as soon as the same line is typed on it. Each
# change of the nodes is a restart, and one of --max-restarts. The head must live: it keeps the list
# of the nodes. The script must go on from its checkpoint on another number of ranks, as
# ddp_surviving.py and fsdp_surviving.py do, and give up a silent rank in time (their --timeout).
#
# --head is the address of one of the nodes, any, as the others reach it: an IPv4 address, or a name
# that means the same everywhere (Debian's /etc/hosts lets a host's own name mean 127.0.1.1).
# --port (29500) must be free there and open to the others; further ports are the kernel's choice,
# so between nodes nothing should be blocked; and nothing from elsewhere should reach these ports,
# which ask for no password. --ranks, if given, is the same on all nodes.
#
# Without GPUs, gloo asks for this host's name to find its network: GLOO_SOCKET_IFNAME=eth0 tells
# it. With GPUs: nccl/ here has the variables.
set -euo pipefail

nodes=1
head=
port=29500
ranks=
restarts=${PET_MAX_RESTARTS:-0} # torchrun's own variable
while [[ ${1:-} == --* ]]; do
  case $1 in
    --nodes) nodes=$2 ;;
    --head) head=$2 ;;
    --port) port=$2 ;;
    --ranks) ranks=$2 ;;
    --max-restarts) restarts=$2 ;;
    *)
      echo "$0: unknown flag $1: before the script: --nodes --head --port --ranks --max-restarts" >&2
      exit 2
      ;;
  esac
  shift 2
done
[[ $# -gt 0 ]] || { sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p}' "$0" >&2; exit 2; }
if [[ ${nodes#*:} -gt 1 && -z $head ]]; then
  echo "$0: $nodes nodes need --head ADDRESS, the address of one of them" >&2
  exit 2
fi

command -v torchrun >/dev/null || { echo "$0: no torchrun: activate the environment with torch" >&2; exit 2; }

if [[ -z $ranks ]]; then
  # "gpu": torchrun asks torch, which knows CUDA_VISIBLE_DEVICES, and fails if torch sees no GPU of
  # those that the driver has. Empty or -1, the variable hides them all: this is for the CPU.
  ranks=2
  if [[ ! ${CUDA_VISIBLE_DEVICES-all} =~ ^(-1)?$ ]]; then
    [[ $(nvidia-smi --list-gpus 2>/dev/null) != GPU* ]] || ranks=gpu
  fi
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # as torchrun does, which would say so at length

if [[ $nodes == 1 ]]; then
  exec torchrun --standalone --nproc-per-node="$ranks" --max-restarts="$restarts" "$@"
fi
# Else torchrun gives ranks that start anew a store in which the addresses of dead ones stand.
[[ $restarts == 0 ]] || export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# This node's own address on the way to the head; the head is the node where the two are the same.
# Told so, torchrun need not guess from the hosts' names, which in clouds and containers often
# resolve to nothing or to 127.0.0.1.
read -r here is_head < <(python3 - "$head" <<'END'
import socket
import sys

with socket.socket(type=socket.SOCK_DGRAM) as way:
    way.connect((sys.argv[1], 9))  # sends nothing: the kernel looks up the route
    here = way.getsockname()[0]
    print(here, int(here == way.getpeername()[0]))
END
)
exec torchrun --nnodes="$nodes" --nproc-per-node="$ranks" --max-restarts="$restarts" \
  --local-addr="$here" \
  --rdzv-backend=c10d --rdzv-endpoint="$head:$port" --rdzv-conf="is_host=$is_head" "$@"
