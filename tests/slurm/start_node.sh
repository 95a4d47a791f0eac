#!/usr/bin/env bash
# Runs one node, in namespaces of its own inside the cluster's, until it is killed.
#   start_node.sh FOLDER NAME
# FOLDER/NAME.pid holds the process whose end ends the node and all that runs on it.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
echo $$ >"$1/$2.pid"
# Not `ip netns exec`: it hides /sys/fs/cgroup, where programs look for the limit of their memory.
exec nsenter --net="/run/netns/$2" \
  unshare --mount --pid --uts --ipc --fork --kill-child --mount-proc "$here/node.sh" "$1" "$2" >"$1/log/$2.out" 2>&1
