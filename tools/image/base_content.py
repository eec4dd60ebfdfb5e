"""What an image has beside packages: the few files that a distribution's installer would write."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from meshfusion.tools.image.architecture import PYTHON, SUITE, Architecture
from meshfusion.tools.image.tree import Entry, directory, symlink, text_file

_TIME_S: Final = 315_532_800  # 1980-01-01: these files are of no commit
USER_ID: Final = 64_110
"""Of the user ``meshfusion``, in a range that distributions leave to packages (Debian Policy 9.2.2)."""
_FILES: Final = {
    "etc/passwd": "root:x:0:0:root:/root:/usr/sbin/nologin\n"
    f"meshfusion:x:{USER_ID}:{USER_ID}:MeshFusion:/var/lib/meshfusion:/usr/sbin/nologin\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "etc/group": f"root:x:0:\ndisk:x:6:\nmeshfusion:x:{USER_ID}:\nnogroup:x:65534:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\nnetworks: files\nprotocols: files\n"
    "services: files\n",
    "etc/os-release": f'PRETTY_NAME="Debian GNU/Linux 12 ({SUITE})"\nNAME="Debian GNU/Linux"\nVERSION_ID="12"\n'
    f"VERSION_CODENAME={SUITE}\nID=debian\n",
    "etc/debian_version": "12\n",
    # Mounted over by what runs the image.
    "etc/hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "etc/hostname": "",
    "etc/resolv.conf": "",
}
_DIRECTORIES: Final = {
    "dev": 0o755, "proc": 0o555, "sys": 0o555, "run": 0o755, "run/meshfusion": 0o755, "tmp": 0o1777, "root": 0o700,
    "etc/meshfusion": 0o755, "var/lib/meshfusion": 0o755, "var/cache/meshfusion": 0o755, "var/log/meshfusion": 0o755,
    "var/tmp": 0o1777,
}  # fmt: skip


def base_entries(architecture: Architecture) -> Iterator[Entry]:
    entries = [
        *(symlink(name, f"usr/{name}") for name in architecture.links),
        *(directory(f"usr/{name}") for name in architecture.links),
        symlink("usr/bin/python3", f"python{PYTHON}"),
        *(directory(path, permissions) for path, permissions in _DIRECTORIES.items()),
        *(text_file(path, text) for path, text in _FILES.items()),
    ]
    return (replace(entry, time_s=_TIME_S) for entry in entries)
