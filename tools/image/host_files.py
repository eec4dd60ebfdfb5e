"""Files for the system that runs an image without a kubelet: systemd's units, modules, and huge pages."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Final

from meshfusion.dpu.config_exports import SpdkConfig
from meshfusion.tools.image.service_needs import CONFIG_FILE, ServiceNeeds
from meshfusion.tools.mfctl.unit_file import UnitFacts, unit_text

SLOT_ROOT: Final = "/var/lib/meshfusion/slots/current/root"
SERVICE_UNIT: Final = "etc/systemd/system/meshfusion.service"
SPDK_UNIT: Final = "etc/systemd/system/meshfusion-spdk.service"
MFCTL: Final = "/usr/local/bin/mfctl"
CACHE: Final = "/var/cache/meshfusion"
HUGE_PAGE_BYTES: Final = 2 << 20
_ALWAYS_BOUND: Final = ("/etc/meshfusion", "/run/meshfusion", "/var/cache/meshfusion", "/var/lib/meshfusion")


def host_files(needs: ServiceNeeds, spdk_program: str | None) -> dict[str, str]:
    """By path below ``/``. ``spdk_program``: path of nvmf_tgt in the service's image; None: it is not in there."""
    template = files("meshfusion.tools").joinpath("data/systemd/meshfusion.service").read_text()
    found = {
        SERVICE_UNIT: unit_text(template, _facts(needs)),
        f"{SERVICE_UNIT}.d/image.conf": _drop_in(needs),
        "etc/tmpfiles.d/meshfusion.conf": _directories(needs),
    }
    if needs.spdk is None:
        found["etc/modules-load.d/meshfusion.conf"] = "nvme\nnvmet\nnvmet-tcp\nnvmet-rdma\n"
        return found
    pages = -(-needs.spdk.memory // HUGE_PAGE_BYTES)
    found["etc/sysctl.d/90-meshfusion.conf"] = (
        f"# For SPDK: {needs.spdk.memory >> 20} MiB in pages of 2 MiB.\nvm.nr_hugepages = {pages}\n"
    )
    if spdk_program is not None:
        found[SPDK_UNIT] = _spdk_unit(needs.spdk, spdk_program)
    return found


def _facts(needs: ServiceNeeds) -> UnitFacts:
    return UnitFacts(
        user="root",
        serve=(MFCTL, "service", "run", "--config", str(CONFIG_FILE)),
        reload=None,  # by a signal: mfctl is inside of the image only
        mounts=tuple(map(Path, (*needs.pools, CONFIG_FILE))),
        writes=tuple(map(Path, needs.folders)),
        reads=(Path(CONFIG_FILE),),
        stop_grace_s=needs.stop_grace_s,
        devices=tuple(map(Path, needs.devices)),
        exports_by_kernel=needs.spdk is None,
        is_encrypted=needs.is_encrypted,
    )


def _drop_in(needs: ServiceNeeds) -> str:
    """The image's root is set by the slots' own drop-in, which binds what each service has."""
    more = [str(folder) for folder in needs.folders if not str(folder).startswith(_ALWAYS_BOUND)]
    more += [str(folder) for folder in needs.folders if str(folder).startswith("/etc/meshfusion/")]
    lines = [
        "# Nothing to run until the first upgrade has filled a slot.",
        "[Unit]",
        "ConditionPathExists=/var/lib/meshfusion/slots/state",
        "",
        "# The service runs from an image: Python keeps what it compiles outside of it.",
        "[Service]",
        f"Environment=PYTHONPYCACHEPREFIX={CACHE}/python",
        "# Who has drives reserved is told by machine.",
        "BindReadOnlyPaths=-/etc/machine-id",
    ]
    if needs.is_encrypted:
        more.append("-/run/cryptsetup")
    return "\n".join([*lines, *([f"BindPaths={' '.join(more)}"] if more else [])]) + "\n"


def _directories(needs: ServiceNeeds) -> str:
    """They are there before the unit's own are made: its mounts need them."""
    named = dict.fromkeys((*_ALWAYS_BOUND, *map(str, needs.folders)))
    return "".join(f"d {folder} 0750 root root -\n" for folder in named)


def _spdk_unit(spdk: SpdkConfig, program: str) -> str:
    # It is not restarted with the service: engines' connections are its own, and the service finds it as it left it.
    return f"""\
[Unit]
Description=SPDK NVMe-oF target for MeshFusion
Before=meshfusion.service
After=network-online.target systemd-sysctl.service
ConditionPathExists={SLOT_ROOT}{program}

[Service]
RootDirectory={SLOT_ROOT}
MountAPIVFS=yes
BindPaths=/dev /dev/hugepages {spdk.socket.parent}
BindReadOnlyPaths=-/etc/resolv.conf -/etc/hosts -/lib/modules
# --wait-for-rpc: the service divides its memory, which is possible only before it begins (docs/exports.md).
ExecStart={program} --wait-for-rpc -r {spdk.socket} -s {spdk.memory >> 20} -m 0x{(1 << spdk.cores) - 1:x}
Restart=on-failure
RestartSec=2s
LimitMEMLOCK=infinity
LimitNOFILE=65536
LimitCORE=0

[Install]
WantedBy=multi-user.target
"""
