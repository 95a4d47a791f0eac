#!/usr/bin/env bash
# Process 1 of a node: gives it the folders that nodes do not share, then runs its daemon.
#   node.sh FOLDER NAME
# The folder tells the nodes of two clusters apart.
set -euo pipefail
hostname "$2"
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mkdir -p /tmp/ray
mount -t tmpfs -o mode=1777 tmpfs /tmp/ray
# In the background: process 1 must stay, and it is bash that collects the processes that lost their parent.
slurmd -D -N "$2" &
wait
