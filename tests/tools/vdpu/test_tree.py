"""Packages as one tree: what dpkg-deb packs, the tree must hold, and cpio must unpack it again."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from meshfusion.tools.lab.errors import LabError
from meshfusion.tools.lab.tcg_image import cpio_archive
from meshfusion.tools.vdpu.tree import entries, file, folder, laid_over, link, merged, unpacked


def package(place: Path, name: str, files: dict[str, str], links: dict[str, str] | None = None) -> Path:
    """A Debian package, by dpkg-deb."""
    root = place / name
    (root / "DEBIAN").mkdir(parents=True)
    (root / "DEBIAN" / "control").write_text(
        f"Package: {name}\nVersion: 1\nArchitecture: all\nMaintainer: t <t@example.org>\nDescription: t\n"
    )
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
        (root / path).chmod(0o755 if "bin/" in path else 0o644)
    for path, target in (links or {}).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).symlink_to(target)
    made = place / f"{name}.deb"
    subprocess.run(("dpkg-deb", "--build", "--root-owner-group", str(root), str(made)), check=True, capture_output=True)
    return made


def test_packages_lie_over_each_other_in_a_merged_usr(tmp_path: Path) -> None:
    one = package(tmp_path, "one", {"bin/tool": "tool", "lib/x/libx.so": "x", "usr/share/doc/one/readme": "no"})
    two = package(tmp_path, "two", {"usr/bin/other": "other", "etc/two.conf": "2"}, {"sbin/alias": "../bin/tool"})
    tree = unpacked([one, two])
    assert tree["bin"] == link("usr/bin")
    assert tree["usr/bin/tool"] == file("tool", 0o755)
    assert tree["usr/lib/x/libx.so"] == file("x")
    assert tree["usr/bin/other"].data == b"other"
    assert tree["usr/sbin/alias"] == link("../bin/tool")
    assert tree["etc/two.conf"] == file("2")
    assert stat.S_ISDIR(tree["usr/lib/x"].mode)
    assert not any(path.startswith(("usr/share/doc/", "bin/", "lib/", "sbin/")) for path in tree)


def test_hard_links_hold_the_same_content(tmp_path: Path) -> None:
    made = tmp_path / "linked"
    (made / "DEBIAN").mkdir(parents=True)
    (made / "DEBIAN" / "control").write_text(
        "Package: linked\nVersion: 1\nArchitecture: all\nMaintainer: t <t@example.org>\nDescription: t\n"
    )
    (made / "bin").mkdir()
    (made / "bin" / "first").write_text("content")
    os.link(made / "bin" / "first", made / "bin" / "second")
    subprocess.run(("dpkg-deb", "--build", str(made), str(tmp_path / "l.deb")), check=True, capture_output=True)
    tree = unpacked([tmp_path / "l.deb"])
    assert tree["usr/bin/first"].data == tree["usr/bin/second"].data == b"content"


def test_a_damaged_package_is_named(tmp_path: Path) -> None:
    made = package(tmp_path, "one", {"etc/one": "x" * 5000})
    made.write_bytes(made.read_bytes()[:-200])
    with pytest.raises(LabError, match=r"one\.deb cannot be unpacked") as raised:
        unpacked([made])
    assert raised.value.next_step


@pytest.mark.parametrize(
    ("path", "expected"),
    [("./bin/sh", "usr/bin/sh"), ("/lib/a/b", "usr/lib/a/b"), ("./etc/x/", "etc/x"), ("./bin", "bin"), ("./", "")],
)
def test_paths_of_packages_are_merged(path: str, expected: str) -> None:
    assert merged(path) == expected


def test_what_is_laid_over_wins_and_has_its_folders() -> None:
    tree = laid_over({"etc": folder(0o700), "etc/a": file("old")}, {"etc/a": file("new"), "var/lib/x/y": file("y")})
    assert tree["etc/a"].data == b"new"
    assert tree["etc"] == folder(0o700)
    assert [path for path in sorted(tree) if path.startswith("var")] == ["var", "var/lib", "var/lib/x", "var/lib/x/y"]


def test_busybox_unpacks_the_archive_to_the_same_tree(tmp_path: Path) -> None:
    tree = laid_over({}, {"usr/bin/tool": file("tool", 0o755), "bin": link("usr/bin"), "etc/empty": file("")})
    subprocess.run(("/bin/busybox", "cpio", "-id"), input=cpio_archive(entries(tree)), cwd=tmp_path, check=True)
    assert (tmp_path / "bin" / "tool").read_text() == "tool"
    assert stat.S_IMODE((tmp_path / "usr" / "bin" / "tool").stat().st_mode) == 0o755
    assert (tmp_path / "etc" / "empty").read_bytes() == b""
