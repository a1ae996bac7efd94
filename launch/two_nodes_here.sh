#!/usr/bin/env bash
# Two nodes on this machine, in one command: two networks with an address each, joined by a cable,
# and launch_ddp.sh in each, as it would be started on two machines.
#
#     two_nodes_here.sh                          # distributed_hello.py, 2 ranks per node
#     two_nodes_here.sh --ranks 1 train.py       # your script
#     two_nodes_here.sh --outage 20:40 --nodes 1:2 --ranks 1 --max-restarts 9 train.py
#         # after 20 seconds node1 is dead: cable cut, processes killed; it comes back 40 s later
#
#     +- node0 -----------+                        +- node1 -----------+
#     | torchrun          |                        | torchrun          |
#     |  rank 0 -- rank 1 | cable ========== cable |  rank 2 -- rank 3 |
#     +-- lo -------------+ 10.0.0.1      10.0.0.2 +-- lo -------------+
#
# It needs Linux, util-linux and iproute2; no root where users may make namespaces of their own
# (Ubuntu 24.04 forbids that: use sudo there). Ranks talk through gloo, on the CPU. Nothing is left
# behind, whatever signal ends it: networks and processes belong to a PID namespace, and the kernel
# ends all of that with its first process.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)

# Outside, stay to pass on signals: the first process of a PID namespace does not hear Ctrl-C. If we
# are killed, setpriv has the nodes killed with us; setsid leaves it to torchrun to tell the ranks.
if [[ -z ${TWO_NODES_STAGE:-} ]]; then
  export TWO_NODES_STAGE=first
  pass_on() {
    local first
    heard=$1
    read -r first <"/proc/${nodes:-$!}/task/${nodes:-$!}/children" # a line without an end
    kill -TERM "$first"
  }
  heard=
  trap 'pass_on 129' HUP
  trap 'pass_on 130' INT
  trap 'pass_on 143' TERM
  setpriv --pdeathsig KILL setsid \
    unshare --user --map-root-user --net --pid --fork --kill-child bash "$0" "$@" &
  nodes=$!
  trap 'kill -KILL "$nodes" 2>/dev/null' EXIT
  wait "$nodes"
  code=$?
  while kill -0 "$nodes" 2>/dev/null; do # it was a signal that ended the waiting
    wait "$nodes"
  done
  exit "${heard:-$code}"
fi

# Inside: the network that we are in is node0's. Keep a descriptor of it, and enter another, node1's.
if [[ $TWO_NODES_STAGE == first ]]; then
  exec 3</proc/self/ns/net
  TWO_NODES_STAGE=second exec unshare --net bash "$0" "$@"
fi
unset TWO_NODES_STAGE
in_node0() { nsenter --net=/proc/self/fd/3 "$@"; }

set -e
ip link add name cable type veth peer name cable netns /proc/self/fd/3
ip address add 10.0.0.2/24 dev cable
in_node0 ip address add 10.0.0.1/24 dev cable
for interface in lo cable; do
  ip link set "$interface" up
  in_node0 ip link set "$interface" up
done
set +e

outage=
if [[ ${1:-} == --outage ]]; then
  outage=$2
  shift 2
fi
[[ $# -gt 0 ]] || set -- "$here/distributed_hello.py"
export GLOO_SOCKET_IFNAME=cable # else gloo takes what the host's name means, often 127.0.0.1
export CUDA_VISIBLE_DEVICES=    # both nodes would take the same GPUs
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR} # no warning that 10.0.0.1 has no name
launch=(bash "$here/launch_ddp.sh" --nodes 2 --head 10.0.0.1 --ranks 2 "$@") # typed on both nodes
as_host='hostname "$0" && exec "$@"'
told=
trap 'told=yes; kill -TERM "${node0:-$!}" "${node1:-$!}" 2>/dev/null' TERM
nsenter --net=/proc/self/fd/3 unshare --uts bash -c "$as_host" node0 "${launch[@]}" &
node0=$!
apart=() # a node that dies takes all its processes with it
[[ -z $outage ]] || apart=(--pid --fork --kill-child=KILL)
start_node1() {
  unshare --uts "${apart[@]}" bash -c "$as_host" node1 "${launch[@]}" &
  node1=$!
}
start_node1

if [[ -n $outage ]]; then
  trap 'told=yes; kill -TERM "$node0"; kill -KILL "$node1" 2>/dev/null' TERM
  sleep "${outage%:*}"
  ip link set cable down
  kill -KILL "$node1"
  wait "$node1"
  echo "node1 is dead"
  sleep "${outage#*:}"
  ip link set cable up
  if kill -0 "$node0" 2>/dev/null; then
    echo "node1 comes back"
    start_node1
  else
    echo "node0 has ended meanwhile"
    node1=$node0
  fi
fi

# If one node fails, the other sees that too and says so. If it does not within 10 s, end it; and if
# it waits for the first inside C++, where torchrun hears no SIGTERM, kill it.
wait -n
code=$?
if [[ $code -ne 0 && -z $told ]]; then
  (sleep 10 && kill -TERM "$node0" "$node1"; sleep 10 && kill -KILL "$node0" "$node1") 2>/dev/null &
fi
wait "$node0" || code=$?
wait "$node1" || code=$?
exit "$code"
