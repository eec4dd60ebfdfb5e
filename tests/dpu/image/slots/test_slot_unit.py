"""What systemd says to the service's unit with the drop-in of the slots."""

from __future__ import annotations

import os
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest
from click.testing import CliRunner

from meshfusion.tools.mfctl.main import mfctl
from tests.dpu.image.slots.script import Script, layer

DROP_IN = files("meshfusion.dpu.image.slots").joinpath("data/slots.conf").read_text()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze (package systemd) is missing")
def test_systemd_takes_the_unit_with_it(tmp_path: Path) -> None:
    config, unit = tmp_path / "service.yaml", tmp_path / "meshfusion.service"
    config.write_text(
        "listen: unix:///run/meshfusion/meshfusion.sock\n"
        "pool: {path: /var/lib/meshfusion/pool, create: true, size: 8MiB}\n"
        "telemetry: {listen: '127.0.0.1:9477'}\n"
    )
    made = CliRunner().invoke(
        mfctl, ["service", "unit", "--config", str(config), "--user", "root", "--output", str(unit)]
    )
    assert made.exit_code == 0, made.output
    drop_in = tmp_path / "meshfusion.service.d/slots.conf"
    drop_in.parent.mkdir()

    def said(text: str) -> str:
        drop_in.write_text(text)
        command = ["systemd-analyze", "verify", "--man=no", str(unit)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stderr

    assert "slots.conf" not in said(DROP_IN)
    assert "slots.conf" in said(DROP_IN.replace("RootDirectoryStartOnly", "RootDirectoryStartsOnly")), "it can fail"


def test_the_slot_is_picked_outside_of_it_and_read_anew_at_each_start() -> None:
    lines = [line for line in DROP_IN.splitlines() if not line.startswith("#")]
    first, second = (line for line in lines if line.startswith("ExecStartPre="))
    assert first == "ExecStartPre=+/usr/lib/meshfusion/slotctl pick"
    assert second == "ExecStartPre=+/usr/lib/meshfusion/slot-runner enter"
    # Without this, ExecStartPre runs inside of the slot (systemd.exec: RootDirectoryStartOnly), + or not.
    assert "RootDirectoryStartOnly=yes" in lines
    assert "RootDirectory=/var/lib/meshfusion/slots/live" in lines


RUNNER = files("meshfusion.dpu.image.slots").joinpath("data/slot-runner")
NSENTER = '#!/bin/sh\nshift 4\nexec "$@"\n'
LOOK = """
"$RUNNER" enter; cat "$MESHFUSION_SLOTS/live/usr/name"
ln -sfn b "$MESHFUSION_SLOTS/current"
"$RUNNER" enter; cat "$MESHFUSION_SLOTS/live/usr/name"
rm -rf "$MESHFUSION_SLOTS/b"; ln -sfn a "$MESHFUSION_SLOTS/current"
"$RUNNER" enter; cat "$MESHFUSION_SLOTS/live/usr/name"
grep -c "$MESHFUSION_SLOTS/live " /proc/self/mountinfo
"""


def test_the_picked_slot_is_where_the_unit_has_its_root(tmp_path: Path) -> None:
    """In a mount namespace that ends with it; nsenter's stand-in stays there."""
    script = Script(tmp_path / "card")
    for slot, name in (("a", b"one\n"), ("b", b"two\n")):
        script.fill(slot, layer({"usr/": None, "usr/name": name}), name=slot)
    (tmp_path / "card/slots/current").symlink_to("a")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nsenter").write_text(NSENTER)
    (tmp_path / "bin/nsenter").chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "MESHFUSION_SLOTS": str(tmp_path / "card/slots"),
        "RUNNER": str(RUNNER),
    }
    alone = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
    found = subprocess.run(
        [*alone, "sh", "-euc", LOOK], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert found.stdout.split() == ["one", "two", "one", "1"], found
