# The second half of every guest's start, in its final root: what a system has besides a root, then the agent.
# Sourced settings: LAB_PYTHON, LAB_LINE, perhaps LAB_DRIVERS (see machine.py). Runs under busybox.
. "$lab/settings"
B=/bin/busybox
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 HOME=/root
cd /
$B mkdir -p /dev/pts /dev/shm
$B mount -t tmpfs -o mode=1777 none /dev/shm
$B mount -t devpts -o ptmxmode=666 none /dev/pts
[ ! -e /proc/modules ] || modprobe configfs # a module in the distribution's kernel
$B mount -t configfs none /sys/kernel/config
$B hostname lab
ip link set lo up
[ -z "$LAB_DRIVERS" ] || modprobe -a $LAB_DRIVERS # nobody else loads modules for the devices that are there
PYTHONPATH="$lab/python" "$LAB_PYTHON" -s -S -B -m meshfusion.tools.lab.guest_agent --line "$LAB_LINE" --seed "$lab/seed"
$B echo "lab: the agent ended with exit status $?"
$B umount /out 2>/dev/null # written back before the power goes
$B poweroff -f
