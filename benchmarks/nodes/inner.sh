#!/bin/bash
# PID 1 of a machine: inner.sh NAME ADDRESS SHARED BELOW COMMAND…
# Own /tmp, /dev/shm and network; SHARED is the one folder that all machines see, as /tmp/shared. BELOW: folders below
# /tmp, joined by colons, that stay where they are: a checkout, or an environment of Python.
name=$1 address=$2 shared=$3
IFS=: read -ra below <<< "$4"
shift 4
set -e
mount --make-rprivate /
hostname "$name"
mount -t tmpfs none /mnt
mkdir /mnt/shared
mount --bind "$shared" /mnt/shared
for i in "${!below[@]}"; do
    mkdir "/mnt/$i"
    mount --bind "${below[i]}" "/mnt/$i"
done
mount -t tmpfs -o size=2g shm /dev/shm
mount -t tmpfs -o size=4g tmp /tmp
chmod 1777 /tmp
mkdir -p /tmp/home /tmp/shared
mount --bind /mnt/shared /tmp/shared
for i in "${!below[@]}"; do
    mkdir -p "${below[i]}"
    mount --bind "/mnt/$i" "${below[i]}"
done
umount --recursive /mnt
for _ in $(seq 200); do # the network card comes from outside
    ip link show eth0 >/dev/null 2>&1 && break
    sleep 0.05
done
ip link set lo up
ip addr add "$address/24" dev eth0
ip link set eth0 up
cd /tmp
exec "$@"
