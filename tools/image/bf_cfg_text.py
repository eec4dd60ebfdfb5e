"""The ``bf.cfg`` of a bundle: what the installer on the card must know, and a hook that prepares the new system.

The installers of github.com/Mellanox/bfb-build source it, and call ``bfb_modify_os`` when the new system is mounted at
``/mnt`` and whole. The image itself is too large for it: it comes with the first ``mfctl dpu upgrade``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from meshfusion.dpu.image.bf_cfg import bf_cfg_problems
from meshfusion.jbof.config_problems import ConfigProblemsError
from meshfusion.tools.image.errors import BuildError

_END: Final = "MESHFUSION_END_OF_FILE"
_HASH: Final = re.compile(r"\$[0-9a-z]{1,4}\$[A-Za-z0-9./$,=]+")
_PUBLIC_KEY: Final = re.compile(r"(?:ssh|ecdsa|sk)-[a-z0-9@.-]+ [A-Za-z0-9+/=]+(?: [^\n'\0]*)?")
_BY_ID: Final = "/dev/disk/by-"
_UNITS: Final = "etc/systemd/system/"
_WANTED: Final = "etc/systemd/system/multi-user.target.wants"


@dataclass(frozen=True, slots=True)
class CardSettings:
    """``device``: the card's boot drive. ``password_hash``: of the user ``ubuntu``, "" leaves the installer's default.
    ``ssh_keys``: who may log in as root."""

    device: str
    password_hash: str = ""
    ssh_keys: tuple[str, ...] = ()


def bf_cfg_text(title: str, settings: CardSettings, files: Mapping[str, tuple[str, int]]) -> str:
    """``files``: by path below ``/`` of the card's system, text and permissions. Raises ConfigProblemsError for what
    may not be pushed, and BuildError."""
    _check(settings)
    placed = dict(files)
    if settings.ssh_keys:
        placed["root/.ssh/authorized_keys"] = ("".join(f"{key}\n" for key in settings.ssh_keys), 0o600)
    lines = [
        f"# {title}. Made by mfctl image build; the installer on the card sources it.",
        f"device={_device(settings.device)}",
        # Ubuntu's installer would otherwise format the last NVMe drive that it sees.
        "ERASE_SSD=no",
        *([f"ubuntu_PASSWORD='{settings.password_hash}'"] if settings.password_hash else []),
        "",
        "meshfusion_put() { # PATH MODE, with the content on stdin",
        "    local path=$meshfusion_root/$1",
        '    mkdir -p "$(dirname "$path")" && cat >"$path" && chmod "$2" "$path"',
        "}",
        "",
        "meshfusion_files() {",
        *(line for path, (text, mode) in sorted(placed.items()) for line in _put(path, text, mode)),
        *_finish(placed),
        "}",
        "",
        "bfb_modify_os() {",
        "    meshfusion_root=${MESHFUSION_ROOT:-/mnt}",
        # Not on its last line alone: a part that failed makes the flash fail, which watches for such lines.
        "    if meshfusion_files; then",
        '        log "INFO: MeshFusion is prepared"',
        "    else",
        '        log "ERROR: MeshFusion could not be prepared"',
        "    fi",
        "}",
    ]
    text = "\n".join(lines) + "\n"
    problems = bf_cfg_problems(text.encode())
    if problems:
        raise ConfigProblemsError(
            "bf.cfg", tuple(problems), next_step="Correct the options or files; nothing was made."
        )
    return text


def _check(settings: CardSettings) -> None:
    if settings.password_hash and not _HASH.fullmatch(settings.password_hash):
        raise BuildError(
            "--password-hash-file: holds no hash of a password", next_step="Make one with: openssl passwd -6"
        )
    for key in settings.ssh_keys:
        if not _PUBLIC_KEY.fullmatch(key):
            raise BuildError(
                f"--ssh-key: has a line that is no public key of OpenSSH: {key[:20]!r}...",
                next_step="Name the file that ends in .pub.",
            )
    if not settings.device.startswith("/dev/") or not re.fullmatch(r"[A-Za-z0-9_./:+-]+", settings.device):
        raise BuildError(
            f"--device {settings.device!r}: is no path below /dev",
            next_step="Write /dev/mmcblk0, or the boot drive as /dev/disk/by-id/nvme-MODEL_SERIAL.",
        )


def _device(path: str) -> str:
    """Installers compare it with the kernel's names."""
    return f"$(readlink -f {shlex.quote(path)})" if path.startswith(_BY_ID) else path


def _put(path: str, text: str, mode: int) -> list[str]:
    if _END in text or not text.endswith("\n") or "\0" in text:
        raise BuildError(f"/{path}: cannot stand in bf.cfg", next_step="End it with a line break, without NULs.")
    parent = str(PurePosixPath(path).parent)
    # Of root's keys only: the others' folders are as the system has them.
    private = [f'    chmod 700 "$meshfusion_root/{parent}" || return 1'] if path.startswith("root/.ssh/") else []
    return [
        f"    meshfusion_put {shlex.quote(path)} {mode:04o} <<'{_END}' || return 1",
        *text.removesuffix("\n").split("\n"),
        _END,
        *private,
    ]


def _finish(files: Mapping[str, object]) -> list[str]:
    """Units begin with the next start of the card; until there is a slot, systemd passes them over."""
    units = [
        path.removeprefix(_UNITS)
        for path in sorted(files)
        if path.startswith(_UNITS) and "/" not in path.removeprefix(_UNITS) and path.endswith(".service")
    ]
    lines = [f'    mkdir -p "$meshfusion_root/{_WANTED}" || return 1'] if units else []
    lines += [f'    ln -sfn "/{_UNITS}{unit}" "$meshfusion_root/{_WANTED}/{unit}" || return 1' for unit in units]
    return [*lines, '    mkdir -p "$meshfusion_root/var/lib/meshfusion/slots"']
