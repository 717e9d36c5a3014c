#!/bin/bash
# Process 1 of a node of the lab (lab.py starts it in namespaces of its own). KILLing it ends all of the node, as a power cut would.
name=$1 address=$2 folder=$3
read -r outside _ < /proc/self/stat # /proc is still the machine's, so this is our pid as seen from there
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs -o size=2g tmpfs /dev/shm # a node's shared memory is its own
mount --bind "$folder/etc/hosts" /etc/hosts
mount --bind "$folder/etc" /etc/slurm # so that jobs need no SLURM_CONF
hostname "$name"
echo "$outside" > "$folder/pids/$name.new" && mv "$folder/pids/$name.new" "$folder/pids/$name.booted"
for ((i = 0; i < 250; i++)); do # until its cable is there
    ip link show eth0 > /dev/null 2>&1 && break
    sleep 0.02
done
ip link set lo up
ip addr add "$address/24" dev eth0
ip link set eth0 up
slurmd -D -N "$name" &
while :; do sleep 1000 & wait $!; done # stays, and reaps orphans, even when slurmd is gone
