#!/bin/sh
# Shapes the link of one pod, on the node that it runs on: `sh -s -- CONTAINER RATE DELAY BURST QUEUE`, with the id of its
# container at containerd, bits per second of payload, microseconds one way, bytes, bytes. What the pod sends waits on its own eth0,
# what it is sent on the node's end of the link, so that several senders share the rate. The kernel drops both with the
# pod. Prints one JSON document. POSIX sh; ctr, nsenter, ip and tc are in the node images of KIND.
set -u
container=$1 rate=$2 delay=$3 burst=$4 queue=$5

fail() {
  echo "$*" >&2
  exit 1
}

pid=$(ctr -n k8s.io tasks ls | while read -r id number _; do [ "$id" = "$container" ] && echo "$number"; done)
[ -n "$pid" ] || fail "the node has no container $container"
inside() { nsenter -t "$pid" -n "$@"; }

peer=$(inside ip -o link show eth0 | sed -n 's/^[0-9]*: eth0@if\([0-9]*\):.*/\1/p')
[ -n "$peer" ] || fail "the pod's eth0 is no link to its node"
peer=$(ip -o link show | sed -n "s/^$peer: \([^:@]*\)[:@].*/\1/p")
[ -n "$peer" ] || fail "the node's end of the pod's link is not on the node"

# tc counts headers, too: Ethernet's 14 bytes, and 52 of IP and TCP in each packet.
mtu=$(inside ip -o link show eth0 | sed -n 's/.* mtu \([0-9]*\) .*/\1/p')
[ "${mtu:-0}" -gt 500 ] || fail "the pod's eth0 has packets of ${mtu:-no} bytes"
rate=$((rate * (mtu + 14) / (mtu - 52)))

# What real clusters differ in is the same here: no slow start after each pause, and no congestion control that probes.
set_kernel() { # NAME VALUE
  printf '%s' "$2" | inside tee "/proc/sys/net/ipv4/$1" >/dev/null 2>&1
}
set_kernel tcp_congestion_control reno
set_kernel tcp_congestion_control cubic
set_kernel tcp_slow_start_after_idle 0
set_kernel tcp_no_metrics_save 1
set_kernel tcp_wmem "4096 65536 $queue"
set_kernel tcp_rmem "4096 131072 $queue"

packets=$((queue / 1500 + 1000))
discipline=netem
if ! reason=$(inside tc qdisc replace dev eth0 root netem rate "${rate}bit" delay "${delay}us" limit $packets 2>&1); then
  [ "$delay" = 0 ] || fail "the kernel of the node has no netem, which delays packets ($reason)"
  discipline=tbf
  reason=$(inside tc qdisc replace dev eth0 root handle 1: tbf rate "${rate}bit" burst "$burst" limit "$queue" 2>&1) ||
    fail "tc refuses to limit the pod's link: $reason"
  # Acknowledgments do not wait behind data, if the kernel has a discipline that lets them past.
  inside tc qdisc add dev eth0 parent 1:1 fq_codel 2>/dev/null || inside tc qdisc add dev eth0 parent 1:1 sfq 2>/dev/null
fi
if [ "$discipline" = netem ]; then
  reason=$(tc qdisc replace dev "$peer" root netem rate "${rate}bit" limit 10000 2>&1) ||
    fail "tc refuses to limit the node's end of the link: $reason"
else
  reason=$(tc qdisc replace dev "$peer" root tbf rate "${rate}bit" burst "$burst" limit "$queue" 2>&1) ||
    fail "tc refuses to limit the node's end of the link: $reason"
fi

show() { tr -d '"\\' | tr '\n' ';'; }
printf '{"discipline":"%s","kernel":"%s","pod":"%s","node":"%s"}\n' "$discipline" "$(uname -r)" \
  "$(inside tc qdisc show dev eth0 | show)" "$(tc qdisc show dev "$peer" | show)"
