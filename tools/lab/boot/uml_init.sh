#!/bin/busybox sh
# Process 1 of the User-Mode Linux guest. Its root is the host's / over hostfs, read-only. Copied to the boot folder,
# whose path the kernel hands over as $lab (see machine.py); busybox is static, so that no library is needed yet.
B=/bin/busybox
root=/mnt/root

stop() {
    $B echo "lab: $*"
    $B poweroff -f
}

. "$lab/settings"
$B mount -t proc none /proc || stop "cannot mount /proc"
$B mount -t tmpfs -o mode=755 none /mnt || stop "cannot mount a tmpfs on /mnt"
$B mkdir /mnt/upper /mnt/work $root
$B mount -t overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work none $root || stop "cannot lay an overlay over /"
$B mount -t proc none $root/proc
$B mount -t sysfs none $root/sys
$B mount -t devtmpfs none $root/dev
$B mkdir -p $root/out
if [ -n "$LAB_HOST_OUT" ]; then
    $B mount -t hostfs -o "$LAB_HOST_OUT" none $root/out || stop "cannot mount the host's $LAB_HOST_OUT"
fi
$B chroot $root /bin/busybox sh "$lab/main.sh"
stop "the end"
