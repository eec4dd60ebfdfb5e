"""What must be in a ``bf.cfg`` before it may be pushed. Reads text, runs nothing.

``bf.cfg`` is a shell script that the installer on the card sources. Where it is silent, the installers of
github.com/Mellanox/bfb-build decide, and in a JBOF their defaults cost data: without ``device`` they install onto the
last NVMe drive they see, and Ubuntu's runs ``nvme format`` on that drive unless ``ERASE_SSD`` says no. A script that
``bash -n`` rejects is passed over, with the same defaults.
"""

from __future__ import annotations

import re
from typing import Final

from meshfusion.jbof.config_problems import ConfigProblem

MAX_BF_CFG_BYTES: Final = 256 * 1024
"""A bound of ours: it has to fit into the last write of a push (:mod:`meshfusion.dpu.image.push`)."""

_ASSIGNMENT: Final = re.compile(r"^[ \t]*(?:export[ \t]+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)$", re.MULTILINE)
_CRYPT_HASH: Final = re.compile(r"\$[0-9a-z]{1,4}\$\S+")
_WORD_END: Final = re.compile(r"[\s;&|]")
_XZ_SIGNATURE: Final = b"7zXZ"
_NVME_NAME: Final = re.compile(r"/dev/nvme\d+n\d+")


def assignments(text: str) -> dict[str, str]:
    """Variables that ``text`` sets at the beginning of a line, without the quotes around their values; the last holds.

    Of a value that is computed (``$(...)``), the text that computes it.
    """
    return {name: _unquoted(value) for name, value in _ASSIGNMENT.findall(text)}


def bf_cfg_problems(data: bytes) -> list[ConfigProblem]:
    """Why ``data`` may not be pushed; empty: it may, as far as its text tells."""
    if len(data) > MAX_BF_CFG_BYTES:
        return [_problem("", f"has {len(data)} bytes, more than {MAX_BF_CFG_BYTES}", "leave files out of it")]
    if b"\0" in data:
        return [_problem("", f"has a NUL at byte {data.index(0)}, which the installer drops", "write plain text")]
    if data[1:5] == _XZ_SIGNATURE:
        return [_problem("", "is an xz archive, which the installer takes for no bf.cfg", "name the text itself")]
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        return [_problem("", f"is not UTF-8 at byte {error.start}", "write plain text")]
    found = assignments(text)
    return [*_device_problems(found), *_erase_problems(found), *_password_problems(found)]


def _device_problems(found: dict[str, str]) -> list[ConfigProblem]:
    device = found.get("device", "")
    if not device:
        problem = "is missing: the installer would take the last NVMe drive that it sees, which may hold a pool"
        return [_problem("device", problem, "add device=/dev/mmcblk0, or the drive of the card that boots")]
    if _NVME_NAME.fullmatch(device):
        problem = "is a name that changes with the drives in the JBOF, so that it may be one of a pool"
        fix = "find it by its serial: device=$(readlink -f /dev/disk/by-id/nvme-MODEL_SERIAL)"
        return [_problem("device", problem, fix, device)]
    return []


def _erase_problems(found: dict[str, str]) -> list[ConfigProblem]:
    problems = []
    if found.get("ERASE_SSD") != "no":
        problem = "is not no: the installer would erase the last NVMe drive that it sees, which may hold a pool"
        problems.append(_problem("ERASE_SSD", problem, "add ERASE_SSD=no", found.get("ERASE_SSD")))
    if found.get("SHRED_DRIVES") == "yes":
        problem = "shreds the last NVMe drive that the installer sees, which may hold a pool"
        problems.append(_problem("SHRED_DRIVES", problem, "remove it", "yes"))
    return problems


def _password_problems(found: dict[str, str]) -> list[ConfigProblem]:
    """Their values are in no message."""
    return [
        _problem(name, "is not the hash of a password", "make one with: openssl passwd -6")
        for name in ("ubuntu_PASSWORD",)
        if name in found and not _CRYPT_HASH.fullmatch(found[name])
    ]


def _problem(name: str, problem: str, fix: str, value: object = None) -> ConfigProblem:
    return ConfigProblem(f"bf.cfg {name}".strip(), problem, fix, value)


def _unquoted(value: str) -> str:
    value = value.strip()
    if value[:1] in ("'", '"'):
        return value[1:].partition(value[0])[0]
    if value.startswith(("$(", "`")):
        return value
    return _WORD_END.split(value, maxsplit=1)[0]
