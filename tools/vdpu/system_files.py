"""What the scripts of the packages would have made of them, for a virtual card: users, links, units, network, ssh."""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterator
from typing import Final

from meshfusion.tools.vdpu.tree import Node, Tree, file, folder, link

TMFIFO_MAC: Final = "00:1a:ca:ff:ff:01"
"""The card's end of tmfifo has this address on real cards, too."""
PORT_MAC: Final = "52:54:00:6d:66:01"
TMFIFO_ADDRESS: Final = "192.168.100.2/30"
PORT_ADDRESS: Final = "10.77.0.1/24"
"""Of p0, the card's port to the network of the engines. It speaks RoCE in software."""

_USERS: Final = (
    ("messagebus", 104, "/nonexistent", "/usr/sbin/nologin"),
    ("systemd-network", 998, "/", "/usr/sbin/nologin"),
    ("sshd", 103, "/run/sshd", "/usr/sbin/nologin"),
    ("ubuntu", 1000, "/home/ubuntu", "/bin/bash"),
)
_SHELLS: Final = "/bin/sh\n/bin/bash\n/usr/bin/sh\n/usr/bin/bash\n"
_ENABLED: Final = ("systemd-networkd.service", "ssh.service", "rshim-up.service", "soft-roce.service")
_MASKED: Final = (
    "apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer", "e2scrub_reap.service",
    "fstrim.timer", "getty@tty1.service", "systemd-hwdb-update.service", "systemd-pcrphase.service",
    "systemd-pcrphase-sysinit.service", "systemd-resolved.service", "systemd-timesyncd.service",
    "nvmefc-boot-connections.service", "nvmf-autoconnect.service",
    "systemd-update-utmp.service", "systemd-update-utmp-runlevel.service", "systemd-journal-catalog-update.service",
)  # fmt: skip
_SSHD: Final = """HostKey /etc/ssh/ssh_host_ed25519_key
PermitRootLogin prohibit-password
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
PrintMotd no
Subsystem sftp /usr/lib/openssh/sftp-server
"""
_KEYS_UNIT: Final = """[Service]
ExecStartPre=
ExecStartPre=/usr/bin/ssh-host-key
ExecStartPre=/usr/sbin/sshd -t
"""
_HOST_KEY: Final = """#!/bin/sh
# The card's own key, made at its first start.
key=/etc/ssh/ssh_host_ed25519_key
test -e $key || ssh-keygen -q -t ed25519 -N "" -f $key
"""
_RSHIM_UNIT: Final = """[Unit]
Description=Tell the host over rshim that the card is up
After=ssh.service

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/bin/bfrshlog "INFO: Linux up"
ExecStart=/usr/bin/bfrshlog "INFO: DPU is ready"

[Install]
WantedBy=multi-user.target
"""
_SOFT_ROCE_UNIT: Final = """[Unit]
Description=RoCE in software on the port p0
BindsTo=sys-subsystem-net-devices-p0.device
After=sys-subsystem-net-devices-p0.device
Before=meshfusion.service

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStartPre=/sbin/modprobe rdma_rxe
ExecStart=/bin/rdma link add rxe_p0 type rxe netdev p0
"""
_OS_RELEASE_NOTE: Final = "A virtual DPU of MeshFusion: Debian, with a stand-in for the installer of a real card.\n"


def system_script(name: str) -> str:
    return (importlib.resources.files("meshfusion.tools.vdpu") / "system" / name).read_text()


def system_files(tree: Tree) -> dict[str, Node]:
    """To be laid over ``tree``, which has the packages' own files."""
    files = dict(_accounts(tree))
    files |= {
        "etc/nsswitch.conf": file("passwd: files\ngroup: files\nshadow: files\nhosts: files dns\n"),
        "etc/shells": file(_SHELLS),
        "etc/hostname": file("virtual-dpu\n"),
        "etc/hosts": file("127.0.0.1 localhost\n127.0.1.1 virtual-dpu\n"),
        "etc/issue": file(_OS_RELEASE_NOTE),
        "etc/localtime": link("/usr/share/zoneinfo/UTC"),
        "etc/mtab": link("/proc/self/mounts"),
        "etc/ssh/sshd_config": file(_SSHD),
        "etc/systemd/system/ssh.service.d/keys.conf": file(_KEYS_UNIT),
        "usr/bin/ssh-host-key": file(_HOST_KEY, 0o755),
        "etc/systemd/system/rshim-up.service": file(_RSHIM_UNIT),
        "etc/systemd/system/default.target": link("/lib/systemd/system/multi-user.target"),
        "etc/systemd/network/10-tmfifo.link": file(_named(TMFIFO_MAC, "tmfifo_net0")),
        "etc/systemd/network/10-p0.link": file(_named(PORT_MAC, "p0")),
        "etc/systemd/network/10-tmfifo.network": file(_addressed("tmfifo_net0", TMFIFO_ADDRESS)),
        "etc/systemd/network/10-p0.network": file(_addressed("p0", PORT_ADDRESS, "RequiredForOnline=no")),
        "etc/systemd/system/soft-roce.service": file(_SOFT_ROCE_UNIT),
        "usr/bin/awk": link("mawk"),
        "usr/bin/bfrshlog": file(system_script("bfrshlog"), 0o755),
        "root": folder(0o700),
        "home/ubuntu": folder(0o755),
        "var/tmp": folder(0o1777),
        "tmp": folder(0o1777),
    }
    wants = "etc/systemd/system/multi-user.target.wants"
    for name in _ENABLED:
        where = "/etc" if f"etc/systemd/system/{name}" in files else "/lib"
        files[f"{wants}/{name}"] = link(f"{where}/systemd/system/{name}")
    files |= {f"etc/systemd/system/{name}": link("/dev/null") for name in _MASKED}
    return files


def installer_files() -> dict[str, Node]:
    """What the installer has besides the system that it installs, which it is not to copy."""
    return {
        "init": file(system_script("install.sh"), 0o755),
        **{name: folder() for name in ("proc", "sys", "dev", "run", "mnt", "installer")},
    }


def _accounts(tree: Tree) -> Iterator[tuple[str, Node]]:
    passwd = tree["usr/share/base-passwd/passwd.master"].data.decode().replace(":*:", ":x:")
    group = tree["usr/share/base-passwd/group.master"].data.decode()
    for name, number, home, shell in _USERS:
        passwd += f"{name}:x:{number}:{number}::{home}:{shell}\n"
        group += f"{name}:*:{number}:\n"
    names = [line.partition(":")[0] for line in passwd.splitlines()]
    yield "etc/passwd", file(passwd)
    yield "etc/group", file(group.replace(":*:", ":x:"))
    yield "etc/shadow", file("".join(f"{name}:*:19000:0:99999:7:::\n" for name in names), 0o640)
    yield "etc/gshadow", file("".join(f"{line.partition(':')[0]}:*::\n" for line in group.splitlines()), 0o640)


def _addressed(interface: str, address: str, link: str = "") -> str:
    more = f"\n[Link]\n{link}\n" if link else ""
    network = f"Address={address}\nLinkLocalAddressing=no\nConfigureWithoutCarrier=yes\nIPv6AcceptRA=no\n"
    return f"[Match]\nName={interface}\n\n[Network]\n{network}{more}"


def _named(mac: str, name: str) -> str:
    return f"[Match]\nMACAddress={mac}\n\n[Link]\nName={name}\n"
