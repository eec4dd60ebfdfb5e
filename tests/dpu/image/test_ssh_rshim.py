"""A card over ssh: the scripts run for real, behind a stand-in for OpenSSH's client that runs them here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from meshfusion.dpu.image.edge.rshim import SshRshim
from meshfusion.dpu.image.edge.shell import SshShell
from meshfusion.dpu.image.errors import CardError, FaultKind
from meshfusion.dpu.image.flash_types import PushEnded, PushMoved
from meshfusion.dpu.image.stream import Stream
from tests.dpu.image.fake_card import BF_CFG, tiny_bfb
from tests.dpu.image.rshim_mount import Mounted, mounted

SSH = """#!/bin/sh
state=$(dirname "$0")
while [ $# -gt 0 ]; do
    case "$1" in
        -o|-p) echo "$1 $2" >> "$state/options"; shift 2 ;;
        -W) forward=$2; shift 2 ;;
        -O) exit 0 ;;
        *) break ;;
    esac
done
shift
[ -e "$state/says" ] && { cat "$state/says" >&2; exit 255; }
[ -n "$forward" ] && exec cat "$state/banner"
exec sh -c "$*"
"""


@pytest.fixture
def ssh(tmp_path: Path) -> Path:
    folder = tmp_path / "ssh"
    folder.mkdir()
    (folder / "ssh").write_text(SSH)
    (folder / "ssh").chmod(0o755)
    return folder


@pytest.fixture
def shell(ssh: Path) -> Iterator[SshShell]:
    made = SshShell("root@host-1", 2222, program=str(ssh / "ssh"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    with mounted(tmp_path_factory.mktemp("dev") / "it's" / "rshim0") as found:  # a folder that has to be quoted
        yield found


@pytest.fixture
def rshim(place: Mounted) -> Mounted:
    return place.renew()


@pytest.fixture
def stream(tmp_path: Path) -> Stream:
    path = tmp_path / "image.bfb"
    path.write_bytes(tiny_bfb(3_000_000))
    return Stream(lambda: path.open("rb"), path.stat().st_size, BF_CFG)


@pytest.fixture
def remote(shell: SshShell, rshim: Mounted) -> SshRshim:
    return SshRshim(shell, str(rshim.folder))


def test_log_and_settings(remote: SshRshim) -> None:
    remote.take()
    remote.set_misc("DISPLAY_LEVEL", 2)
    misc = remote.read_misc()
    assert (misc.display_level, misc.log[-1]) == (2, " INFO[MISC]: DPU is ready")


def test_all_of_a_stream_arrives_and_nothing_is_left_on_the_host(
    remote: SshRshim, rshim: Mounted, stream: Stream, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "ssh"))
    before = sorted(path.name for path in (tmp_path / "ssh").iterdir())
    remote.begin_push(stream)
    moved = [remote.continue_push()]
    while isinstance(moved[-1], PushMoved):
        moved.append(remote.continue_push())
    assert isinstance(moved[-1], PushEnded)
    state = rshim.state
    assert (state["pushed_bytes"], state["erased_pool_drives"]) == (stream.total_bytes, 0)
    left = sorted(path.name for path in (tmp_path / "ssh").iterdir() if not path.name.startswith("mfctl-ssh-"))
    assert left == sorted({*before, "options"})


def test_a_connection_that_breaks_leaves_the_card_without_the_end(
    remote: SshRshim, rshim: Mounted, stream: Stream
) -> None:
    remote.begin_push(stream)
    while isinstance(step := remote.continue_push(), PushMoved) and step.done_bytes < stream.body_bytes:
        pass
    assert remote._process is not None
    assert remote._process.stdin is not None
    remote._process.stdin.close()  # as sshd closes it, all of the body being there
    assert remote._process.wait(10) != 0
    remote.abandon_push()
    state = rshim.state
    assert state["pushed_bytes"] == stream.body_bytes
    assert (state["erased_pool_drives"], state["installed"], state["is_boot_open"]) == (0, 0, False)


@pytest.mark.parametrize(
    ("behaviour", "kind"),
    [
        ({"is_dropped": True}, FaultKind.OWNED_ELSEWHERE),
        ({"is_locked": True}, FaultKind.LOCKED),
        ({"busy_for_s": 1e9}, FaultKind.BUSY),
    ],
)
def test_what_the_driver_refuses_is_told_apart(
    remote: SshRshim, rshim: Mounted, stream: Stream, behaviour: dict[str, object], kind: FaultKind
) -> None:
    rshim.behave(**behaviour)
    with pytest.raises(CardError, match="rshim0/boot on root@host-1: ") as raised:
        remote.begin_push(stream)
    remote.abandon_push()
    assert raised.value.kind is kind
    assert rshim.state["resets"] == 0


def test_a_card_that_takes_no_more(remote: SshRshim, rshim: Mounted, stream: Stream) -> None:
    rshim.behave(stall_at_bytes=1_000_000)
    remote.begin_push(stream)
    with pytest.raises(CardError, match="timed out") as raised:
        _continue(remote)
    remote.abandon_push()
    assert raised.value.kind is FaultKind.STALLED


def test_a_host_without_the_driver(shell: SshShell) -> None:
    with pytest.raises(CardError, match="No such file or directory") as raised:
        SshRshim(shell, "/dev/rshim99").take()
    assert raised.value.kind is FaultKind.GONE


@pytest.mark.parametrize(
    ("says", "kind"),
    [
        ("ssh: connect to host host-1 port 22: Connection refused", FaultKind.UNREACHABLE),
        ("root@host-1: Permission denied (publickey).", FaultKind.DENIED),
        ("Host key verification failed.", FaultKind.DENIED),
        ("", FaultKind.UNREACHABLE),
    ],
)
def test_ssh_that_fails_is_told_as_ssh(remote: SshRshim, ssh: Path, says: str, kind: FaultKind) -> None:
    (ssh / "says").write_text(says)
    with pytest.raises(CardError, match="ssh to root@host-1: ") as raised:
        remote.read_misc()
    assert raised.value.kind is kind
    assert "ssh root@host-1 true" in raised.value.next_step


def test_ssh_never_asks_and_shares_one_connection(shell: SshShell, ssh: Path) -> None:
    shell.run("true", about="nothing")
    options = (ssh / "options").read_text()
    for option in ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5", "ControlMaster=auto", "-p 2222"):
        assert option in options
    assert "StrictHostKeyChecking=no" not in options


def test_a_script_that_hangs_is_given_up(shell: SshShell) -> None:
    with pytest.raises(CardError, match=r"no answer within 0\.2 s") as raised:
        shell.run("exec sleep 60", about="sleep", timeout_s=0.2)
    assert raised.value.kind is FaultKind.UNREACHABLE


def test_a_banner_is_read_through_the_host(shell: SshShell, ssh: Path) -> None:
    (ssh / "banner").write_text("SSH-2.0-OpenSSH_8.9p1 Ubuntu-3\r\n")
    assert shell.banner("192.168.100.2", 22) == "SSH-2.0-OpenSSH_8.9p1 Ubuntu-3"
    (ssh / "banner").write_text("")
    assert shell.banner("192.168.100.2", 22) == ""


def _continue(remote: SshRshim) -> None:
    while isinstance(remote.continue_push(), PushMoved):
        pass
