#!/bin/busybox sh
# Process 1 of the installed system's initramfs: finds its root by label and goes there.
B=/bin/busybox
$B mount -t proc none /proc
$B mount -t sysfs none /sys
$B mount -t devtmpfs none /dev
while read -r module; do
    $B insmod "/modules/$module" || $B echo "boot: cannot load $module"
done </modules/order
root=
for word in $($B cat /proc/cmdline); do
    case "$word" in root=*) root=${word#root=} ;; esac
done
tries=0
until device=$($B findfs "$root" 2>/dev/null) && $B mount -t ext4 "$device" /root; do
    tries=$((tries + 1))
    if [ $tries -ge 60 ]; then
        $B echo "boot: no root $root"
        $B poweroff -f
    fi
    $B sleep 0.5
done
$B mount -o move /dev /root/dev
$B umount /sys
$B umount /proc
exec $B switch_root /root /usr/lib/systemd/systemd
