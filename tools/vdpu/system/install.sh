#!/bin/bash
# Process 1 of the installer that a virtual card boots from its stream. It does what the installers of
# github.com/Mellanox/bfb-build do with bf.cfg, in their order and with their lines in the card's log; what concerns
# chips that are not there (ATF, UEFI, NIC, BMC) is left out.
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PATH LANG=C
distro="Debian"

say() { echo "installer: $*"; }
log() {
    say "$*"
    bfrshlog "$*"
}
function_exists() { [ "$(type -t "$1")" = function ]; }
run_hook() {
    if function_exists "$1"; then
        log "INFO: Running $1 from bf.cfg"
        "$1"
    fi
}
restart() {
    sync
    sleep 1 # so that what was said is read
    echo b >/proc/sysrq-trigger
    sleep 60
}
fail() {
    log "ERR: $*"
    log "ERR: Installation failed"
    restart
}

start_devices() {
    mount -t proc proc /proc
    mount -t sysfs sysfs /sys
    mount -t devtmpfs devtmpfs /dev
    mount -t tmpfs tmpfs /run
    mkdir -p /tmp /mnt
    /usr/lib/systemd/systemd-udevd --daemon
    udevadm trigger --type=subsystems --action=add
    udevadm trigger --type=devices --action=add
    modprobe -a ext4 vfat nls_cp437 nls_ascii
    udevadm settle --timeout=60
}

# As theirs do: without device, the last NVMe drive where there is one.
choose_device() {
    local default_device=/dev/mmcblk0
    if [ -b /dev/nvme0n1 ]; then
        default_device="/dev/$(cd /sys/block && ls -1d nvme* | sort -V | tail -1)"
    fi
    device=${device:-$default_device}
    device=$(readlink -f "$device")
    say "OS installation target: $device"
    local tries=0
    until [ -b "$device" ]; do
        tries=$((tries + 1))
        [ $tries -lt 30 ] || fail "$device does not appear"
        sleep 1
    done
}

# As theirs do, unless ERASE_SSD says no: the last NVMe drive, whether or not it is the target.
erase_drive() {
    local drive
    [ "$ERASE_SSD" = no ] && return
    drive=$(cd /sys/block && ls -1d nvme* 2>/dev/null | sort -V | tail -1)
    [ -n "$drive" ] || return
    log "INFO: Erasing /dev/$drive"
    nvme format "/dev/$drive" --namespace-id=1 --ses=0 --force
}

partition() {
    case "$1" in
        *[0-9]) echo "${1}p$2" ;;
        *) echo "$1$2" ;;
    esac
}

make_partitions() {
    dd if=/dev/zero of="$device" bs=1M count=1 status=none
    sfdisk --quiet --force "$device" <<PARTITIONS || fail "no partitions can be made on $device"
label: gpt
size=128MiB, type=C12A7328-F81F-11D2-BA4B-00A0C93EC93B, name="EFI System"
type=0FC63DAF-8483-4772-8E79-3D69D8477DE4, name="writable"
PARTITIONS
    udevadm settle --timeout=30
    mkfs.fat -F 32 -n EFI0 "$(partition "$device" 1)" >/dev/null || fail "no file system can be made on $device"
    mkfs.ext4 -q -F -L OS0 -E lazy_itable_init=1 "$(partition "$device" 2)" || fail "no file system can be made on $device"
    mount -t ext4 "$(partition "$device" 2)" /mnt || fail "$(partition "$device" 2) cannot be mounted"
    mkdir -p /mnt/boot/efi
    mount -t vfat "$(partition "$device" 1)" /mnt/boot/efi || fail "$(partition "$device" 1) cannot be mounted"
}

# The installer's own root is the system that it installs.
copy_system() {
    tar -C / --one-file-system --exclude=./init --exclude=./installer --exclude=./mnt/* --exclude=./etc/bf.cfg \
        --exclude=./boot/* -cf - . | tar -C /mnt -xpf - || fail "the system does not fit"
    cp /installer/initrd.img /mnt/boot/initrd.img && cp /installer/vmlinuz /mnt/boot/vmlinuz || fail "no kernel"
    mkdir -p /mnt/proc /mnt/sys /mnt/dev /mnt/run /mnt/tmp /mnt/root
    chmod 1777 /mnt/tmp
    chmod 700 /mnt/root
}

configure_system() {
    printf 'LABEL=OS0 / ext4 defaults 0 1\nLABEL=EFI0 /boot/efi vfat umask=0077,nofail 0 2\n' >/mnt/etc/fstab
    tr -d - </proc/sys/kernel/random/uuid >/mnt/etc/machine-id
    if [ -n "$ubuntu_PASSWORD" ]; then
        log "INFO: Changing the default password for user ubuntu"
        sed -i "s|^ubuntu:[^:]*:|ubuntu:$ubuntu_PASSWORD:|" /mnt/etc/shadow
    fi
}

install_boot_loader() {
    mkdir -p /mnt/boot/efi/EFI/BOOT /mnt/boot/efi/loader/entries
    cp /usr/lib/systemd/boot/efi/systemd-bootaa64.efi /mnt/boot/efi/EFI/BOOT/BOOTAA64.EFI || fail "no boot loader"
    cp /mnt/boot/vmlinuz /mnt/boot/efi/vmlinuz.efi && cp /mnt/boot/initrd.img /mnt/boot/efi/ || fail "the ESP is full"
    printf 'timeout 0\neditor no\n' >/mnt/boot/efi/loader/loader.conf
    printf 'title %s\nlinux /vmlinuz.efi\ninitrd /initrd.img\noptions root=LABEL=OS0 %s\n' \
        "$distro" "$(cat /installer/cmdline)" >/mnt/boot/efi/loader/entries/os0.conf
}

bind_system() {
    local place
    for place in proc sys dev; do
        mount --bind /$place /mnt/$place
    done
    chroot /mnt ldconfig
}

install_system() {
    erase_drive
    log "INFO: $distro installation started"
    choose_device
    make_partitions
    run_hook bfb_pre_install
    log "INFO: Installing OS image"
    copy_system
    configure_system
    bind_system
    install_boot_loader
    run_hook bfb_modify_os
    umount /mnt/proc /mnt/sys /mnt/dev
    sync
    umount /mnt/boot/efi && umount /mnt || fail "what was written cannot be written out"
    log "INFO: $distro installation completed"
}

start_devices
if [ -s /etc/bf.cfg ]; then
    if bash -n /etc/bf.cfg; then
        log "INFO: Found bf.cfg"
        . /etc/bf.cfg
    else
        log "INFO: Invalid bf.cfg"
    fi
fi
install_system
run_hook bfb_custom_action1
run_hook bfb_post_install
log "INFO: Installation finished"
log "INFO: Rebooting..."
restart
