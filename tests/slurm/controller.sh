#!/usr/bin/env bash
# Process 1 of the cluster's namespaces: sets up the network and the folders, then runs the controller and the nodes.
#   controller.sh FOLDER NAME=ADDRESS...
# Everything here is private to the namespaces: when this process ends, mounts, network and processes are gone.
set -euo pipefail
readonly folder=$1
shift
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

hostname controller
mkdir -p /etc/slurm /var/lib/slurm /var/log/slurm /run/netns
mount --bind "$folder/etc" /etc/slurm
mount --bind "$folder/etc/hosts" /etc/hosts
mount --bind "$folder/etc/resolv.conf" /etc/resolv.conf
mount --bind "$folder/lib" /var/lib/slurm
mount --bind "$folder/log" /var/log/slurm
mount -t tmpfs tmpfs /run/netns

ip link set lo up
ip link add br0 type bridge
ip address add 10.77.0.1/24 dev br0
ip link set br0 up
for node in "$@"; do
  name=${node%%=*}
  ip netns add "$name"
  ip link add "to-$name" type veth peer name eth0 netns "$name"
  ip link set "to-$name" master br0 up
  ip -n "$name" link set lo up
  ip -n "$name" address add "${node#*=}/24" dev eth0
  ip -n "$name" link set eth0 up
  ip -n "$name" route add default via 10.77.0.1
done

slurmctld -D -c >"$folder/log/slurmctld.out" 2>&1 &
for node in "$@"; do "$here/start_node.sh" "$folder" "${node%%=*}" & done
touch "$folder/namespaces-are-ready"
wait
