"""A whole small world to build bundles from: packages, a lock of them, and a repository with one commit."""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import subprocess
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from meshfusion.tools.image.lock import Lock, LockedPackage, lock_text

DAY_S = 1_700_000_000  # 2023-11-14T22:13:20Z
PROJECT = """\
[project]
name = "meshfusion"
version = "3.4.5"
dependencies = ["one>=1,<2"]

[project.optional-dependencies]
dpu = ["spdk>=26.9,<27"]

[project.scripts]
meshfusion = "meshfusion.tools.mfctl.main:service_main"
"""
CONFIG = """\
listen: unix:///run/meshfusion/meshfusion.sock
pool: {path: /var/lib/meshfusion/pool, data_path: [/dev/disk/by-id/nvme-A_1, /dev/disk/by-id/nvme-A_2]}
exports: {target: nvmet, portals: ["tcp://10.0.0.7:4420"]}
telemetry: {listen: 127.0.0.1:9477}
"""
SPDK_CONFIG = """\
listen: unix:///run/meshfusion/meshfusion.sock
pool: {path: /var/lib/meshfusion/pool}
exports: {target: spdk, portals: ["rdma://10.0.0.7:4420"], spdk: {socket: /run/spdk/spdk.sock, memory: 8GiB, cores: 2}}
telemetry: {listen: 127.0.0.1:9477}
"""
ELF_MACHINES = {"arm64": 183, "amd64": 62}


def make_deb(
    path: Path,
    name: str,
    files: Mapping[str, bytes | str],
    *,
    version: str = "1.0-1",
    architecture: str = "arm64",
    depends: str = "",
    programs: tuple[str, ...] = (),
) -> Path:
    """With dpkg's own tool. ``files``: by path; a string is the target of a symbolic link."""  # fmt: skip
    root = path.parent / f"{path.name}.root"
    (root / "DEBIAN").mkdir(parents=True)
    fields = {"Package": name, "Version": version, "Architecture": architecture, "Maintainer": "nobody <n@example.org>"}
    fields |= ({"Depends": depends} if depends else {}) | {"Description": "for tests"}
    (root / "DEBIAN" / "control").write_text("".join(f"{key}: {value}\n" for key, value in fields.items()))
    for place, content in files.items():
        target = root / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            target.symlink_to(content)
        else:
            target.write_bytes(content)
            target.chmod(0o755 if place in programs else 0o644)
    argv = ["dpkg-deb", "--build", "--root-owner-group", "-Zgzip", str(root), str(path)]
    subprocess.run(argv, check=True, capture_output=True, env={**os.environ, "SOURCE_DATE_EPOCH": str(DAY_S)})
    shutil.rmtree(root)
    return path


def make_wheel(path: Path, name: str, version: str, files: Mapping[str, bytes], *, licence: str = "") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for place, content in files.items():
            archive.writestr(zipfile.ZipInfo(place, (2020, 1, 2, 3, 4, 6)), content)
        tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(zipfile.ZipInfo(f"{name}-{version}.dist-info/WHEEL"), tags)
        metadata = f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n"
        metadata += f"License-Expression: {licence}\n" if licence else ""
        archive.writestr(zipfile.ZipInfo(f"{name}-{version}.dist-info/METADATA"), metadata)
    return path


def elf(architecture: str) -> bytes:
    """The beginning of a program, as far as anybody looks."""
    header = b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HH", 2, ELF_MACHINES[architecture])
    return header + bytes(40)


@dataclass(frozen=True)
class World:
    """``cache``: has all that the lock names, so that nothing is fetched."""

    repository: Path
    cache: Path
    config: Path
    lock: Lock

    @property
    def options(self) -> list[str]:
        return ["--config", str(self.config), "--source", str(self.repository), "--cache", str(self.cache)]


def make_world(folder: Path, *, architecture: str = "arm64", config: str = CONFIG) -> World:
    folder.mkdir(parents=True, exist_ok=True)
    packages = folder / "packages"
    packages.mkdir()
    library = "lib/aarch64-linux-gnu"
    debs = {
        "libtwo": make_deb(
            packages / "libtwo.deb", "libtwo",
            {
                f"{library}/libtwo.so.2.0": b"two", f"{library}/libtwo.so.2": "libtwo.so.2.0",
                "usr/share/doc/libtwo/copyright": b"licence", "usr/share/doc/libtwo/changelog.gz": b"log",
                "usr/share/man/man1/two.1.gz": b"page",
            },
            architecture=architecture,
        ),
        "python3.11": make_deb(
            packages / "python.deb", "python3.11", {"usr/bin/python3.11": elf(architecture), "etc/python.conf": b"x"},
            version="1:3.11.2-6+deb12u1", architecture=architecture, programs=("usr/bin/python3.11",),
        ),
    }  # fmt: skip
    wheels = {
        "one": make_wheel(
            packages / "one.whl", "one", "1.5",
            {"one/__init__.py": b"x = 1\n", "one-1.5.data/scripts/run-one": b"#!python\nprint()\n"},
            licence="MIT",
        )
    }  # fmt: skip
    versions = {"libtwo": "1.0-1", "python3.11": "1:3.11.2-6+deb12u1", "one": "1.5"}
    cache = folder / "cache"
    (cache / "files").mkdir(parents=True)

    def locked(name: str, path: Path) -> LockedPackage:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copy(path, cache / "files" / digest)
        return LockedPackage(name=name, version=versions[name], sha256=digest, targets=["nvmet", "spdk"])

    lock = Lock(
        format=1, architecture=architecture, suite="bookworm", python="3.11",  # type: ignore[arg-type]
        roots={"nvmet": ["python3.11"], "spdk": ["python3.11"]},
        requires={"nvmet": ["one>=1,<2"], "spdk": ["one>=1,<2", "spdk>=26.9,<27"]},
        debs=[locked(name, path) for name, path in debs.items()],
        wheels=[locked(name, path) for name, path in wheels.items()],
    )  # fmt: skip
    (folder / "service.yaml").write_text(config)
    repository = make_repository(folder / "repository", lock)
    return World(repository, cache, folder / "service.yaml", lock)


def make_repository(root: Path, lock: Lock) -> Path:
    files = {
        "pyproject.toml": PROJECT,
        "LICENSE": "Apache\n",
        f"tools/data/image/{lock.architecture}.json": lock_text(lock),
        "jbof/__init__.py": "",
        "dpu/__init__.py": "",
        "dpu/image/slots/data/slotctl": "#!/bin/sh\necho slot\n",
        "dpu/image/slots/data/slots.conf": "[Service]\nRootDirectory=/var/lib/meshfusion/slots/current/root\n",
        "host/__init__.py": "",
        "tools/__init__.py": "",
        "tools/mfctl/main.py": "def service_main():\n    print('served')\n",
        "tests/test_left_out.py": "",
    }
    for place, text in files.items():
        path = root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "dpu/image/slots/data/slotctl").chmod(0o755)
    git(root, "init", "--quiet", "--initial-branch=main")
    commit(root, "First")
    return root


def commit(root: Path, message: str) -> str:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", message)
    return git(root, "rev-parse", "HEAD")


def git(root: Path, *arguments: str) -> str:
    date = f"{DAY_S} +0000"
    who = {"GIT_AUTHOR_NAME": "n", "GIT_AUTHOR_EMAIL": "n@example.org", "GIT_AUTHOR_DATE": date}
    who |= {key.replace("AUTHOR", "COMMITTER"): value for key, value in who.items()}
    argv = ["git", "-C", str(root), "-c", "commit.gpgsign=false", *arguments]
    done = subprocess.run(argv, check=True, capture_output=True, text=True, env={**os.environ, **who})
    return done.stdout.strip()
