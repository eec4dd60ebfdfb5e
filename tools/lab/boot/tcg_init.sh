#!/bin/busybox sh
# Process 1 of the emulated machine, from its initramfs: the host's / comes over 9p, read-only. The kernel hands the
# path of the boot folder over as $lab (see machine.py).
B=/bin/busybox
root=/newroot

stop() {
    $B echo "lab: $*"
    $B poweroff -f
}

$B mount -t proc none /proc
$B mount -t sysfs none /sys
$B mount -t devtmpfs none /dev
while read -r module; do
    $B insmod "/modules/$module" || stop "cannot load $module"
done </modules/order
$B mkdir -p /host /memory $root
$B mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=262144 host /host || stop "cannot mount the host's /"
$B mount -t tmpfs -o mode=755 none /memory
$B mkdir /memory/upper /memory/work
$B mount -t overlay -o lowerdir=/host,upperdir=/memory/upper,workdir=/memory/work none $root ||
    stop "cannot lay an overlay over /"
. "$root$lab/settings"
for place in proc sys dev; do
    $B mount -o move /$place $root/$place
done
$B mkdir -p $root/out
if [ -n "$LAB_HOST_OUT" ]; then
    $B mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144 out $root/out || stop "cannot mount the host's $LAB_HOST_OUT"
fi
# depmod's tables are in the modules' folder: modprobe finds them there under /lib/modules.
$B mkdir -p $root/lib/modules
$B mount -t tmpfs none $root/lib/modules
$B ln -s "$LAB_MODULES" "$root/lib/modules/$($B uname -r)"
exec $B switch_root $root /bin/busybox sh "$lab/main.sh"
