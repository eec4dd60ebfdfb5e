"""The script that decides on the card: alone, beside its twin, and killed wherever it writes."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from meshfusion.dpu.image.slots.card_state import CardState, ServiceRuns
from tests.dpu.image.slots.script import SLOTCTL, Script, layer, sha256
from tests.dpu.image.slots.twin import BusyError, DamagedError, RefusedError, Twin

LAYER = layer({"usr/": None, "usr/name": b"one"})


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path / "card")


def _on_trial(script: Script, seconds: int = 100) -> str:
    """Slot a committed and running, b armed."""
    first = script.fill("a", LAYER)
    script.run("arm", "a", "t-1", "50", first, check=True)
    script.run("pick", check=True)
    script.service("running")
    script.run("commit", "t-1", check=True)
    second = script.fill("b", LAYER, name="two")
    script.run("arm", "b", "t-2", str(seconds), second, check=True)
    script.asked()
    return second


def test_layers_come_one_above_the_other(script: Script) -> None:
    lower = layer({"etc/": None, "etc/kept": b"kept", "etc/gone": b"gone", "etc/changed": b"old", "var/": None,
                   "var/old/": None, "var/old/a": b"a"})  # fmt: skip
    upper = layer({"etc/.wh.gone": b"", "etc/changed": b"new", "var/old/.wh..wh..opq": b"", "var/old/b": b"b"})
    script.fill("a", lower, upper)
    root = script.folder / "slots/a/root"
    assert sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()) == [
        "etc/changed", "etc/kept", "var/old/b",
    ]  # fmt: skip
    assert (root / "etc/changed").read_bytes() == b"new"
    assert script.run("show", "a", "manifest").stdout == b"manifest of one"


def test_a_layer_that_leaves_its_root_is_refused(script: Script) -> None:
    bad = layer({"../outside": b"x"})
    with pytest.raises(Exception, match="non-zero exit status"):
        script.fill("a", bad)
    assert script.status().slots == {"a": ""}
    assert not (script.folder / "slots/a/outside").exists()


def test_a_trial_is_started_once(script: Script) -> None:
    _on_trial(script)
    script.run("switch", "t-2", check=True)
    assert script.asked() == ["restart"]
    assert script.run("pick").stdout == b"b\n"
    script.run("switch", "t-2", check=True)
    assert script.asked() == [], "it was started already"
    assert script.run("pick").stdout == b"a\n", "it had stopped by itself"
    state = script.status()
    assert (state.trial, state.committed, state.running) == (None, "a", "a")
    assert state.is_last("t-2", "its service stopped")
    assert script.run("commit", "t-2").returncode == 3


def test_after_another_boot_the_committed_one_starts(script: Script) -> None:
    _on_trial(script)
    script.at(5.0, "boot-1")
    assert script.run("pick").stdout == b"a\n"
    assert script.status().is_last("t-2", "its time was over")


def test_the_deadman_gives_back_and_is_not_fooled_by_an_abort_that_was_cut_off(script: Script) -> None:
    _on_trial(script)
    script.run("pick", check=True)
    decided = (script.folder / "slots/state").read_text()
    script.run("expire", "t-1", check=True)
    assert script.asked() == [], "the deadman of another trial"
    script.run("expire", "t-2", check=True)
    assert script.asked() == ["restart"]
    # The trial had ended and nobody had started the service anew: whoever comes next does.
    assert script.status().running == "b"
    script.run("expire", "t-2", check=True)
    assert script.asked() == ["restart"]
    # The former service had been drained, and nobody had started it anew.
    (script.folder / "slots/state").write_text(decided)
    script.run("abort", "t-2", "no", check=True)
    script.run("pick", check=True)
    script.service("stopped")
    script.asked()
    script.run("expire", "t-2", check=True)
    assert script.asked() == ["restart"]


@pytest.mark.parametrize("order", [("commit", "expire"), ("expire", "commit")])
def test_of_commit_and_deadman_one_is_first(script: Script, order: tuple[str, str]) -> None:
    _on_trial(script)
    script.run("pick", check=True)
    codes = [script.run(verb, "t-2").returncode for verb in order]
    state = script.status()
    if order[0] == "commit":
        assert (codes, state.committed, script.asked()) == ([0, 0], "b", ["disarm"])
    else:
        assert (codes, state.committed, script.asked()) == ([0, 3], "a", ["restart"])


def test_without_a_committed_slot_nothing_comes_back(script: Script) -> None:
    assert script.run("pick").returncode == 3
    first = script.fill("a", LAYER)
    script.run("arm", "a", "t-1", "50", first, check=True)
    script.run("pick", check=True)
    script.asked()
    script.run("abort", "t-1", "no", check=True)
    assert script.asked() == ["stop", "disarm"]
    assert script.run("pick").returncode == 3


def test_what_is_committed_or_on_trial_is_not_written_to(script: Script) -> None:
    _on_trial(script)
    digests = [sha256(blob) for blob in (b"manifest of one", b"{}", LAYER)]
    assert b"is the committed one" in script.run("unpack", "a", *digests).stderr
    assert b"busy: slot b is on trial" in script.run("unpack", "b", *digests).stderr
    script.run("pick", check=True)
    script.run("abort", "t-2", "no", check=True)
    assert b"busy: the service in slot b still stops" in script.run("unpack", "b", *digests).stderr
    assert script.status().slots["b"] == sha256(b"manifest of two")


def test_copying_goes_on_where_it_was(script: Script) -> None:
    data = bytes(range(256)) * 40
    digest = sha256(data)
    script.run("put", digest, "0", str(len(data)), data=data[:5000], check=True)
    assert script.status().blobs == {f"{digest}.part": 5000}
    assert b"busy: " in script.run("put", digest, "4000", str(len(data)), data=data[4000:]).stderr
    script.run("put", digest, "5000", str(len(data)), data=data[5000:], check=True)
    assert script.status().blobs == {digest: len(data)}
    other = sha256(b"other")
    assert script.run("put", other, "0", "5", data=b"0ther").returncode == 4
    assert script.status().blobs == {digest: len(data)}
    script.run("forget", digest, other, check=True)
    assert script.status().blobs == {}


@pytest.mark.parametrize(
    "words",
    [(), ("sta",), ("status", "x"), ("put", "../../etc/passwd", "0", "1"), ("put", "a" * 64, "-1", "1"),
     ("forget", "../state"), ("unpack", "c", "a" * 64, "b" * 64, "c" * 64), ("arm", "a", "t 1", "5", "a" * 64),
     ("show", "a", "../state"), ("abort", "t/1", "x")],
)  # fmt: skip
def test_words_that_mean_nothing(script: Script, words: tuple[str, ...]) -> None:
    assert script.run(*words).returncode == 2
    assert script.status().blobs == {}


def test_another_format_is_left_alone(script: Script) -> None:
    _on_trial(script)
    path = script.folder / "slots/state"
    path.write_text(path.read_text().replace("format=1", "format=2"))
    before = path.read_text()
    for words in (("pick",), ("status",), ("expire", "t-2"), ("commit", "t-2")):
        assert script.run(*words).returncode == 3
    assert path.read_text() == before


# Beside its twin.


@dataclass
class _Noted:
    asked: list[str] = field(default_factory=list)
    now: ServiceRuns = ServiceRuns.STOPPED

    def restart(self) -> None:
        self.asked.append("restart")

    def stop(self) -> None:
        self.asked.append("stop")

    def state(self) -> ServiceRuns:
        return self.now

    def arm(self, seconds: int, token: str) -> None:
        self.asked.append(f"arm {seconds} {token}")

    def disarm(self) -> None:
        self.asked.append("disarm")


def _comparable(state: CardState) -> dict[str, Any]:
    names = ("service", "running", "committed", "trial", "last", "slots", "blobs", "boot")
    return {name: getattr(state, name) for name in names}


def _step(rng: random.Random, script: Script, twin: Twin, noted: _Noted, blobs: list[bytes]) -> str:
    """One verb to both; what it was."""
    verbs = ("put", "put", "unpack", "unpack", "arm", "arm", "arm", "switch", "pick", "pick", "commit", "commit",
             "abort", "expire", "forget")  # fmt: skip
    verb, token, slot, blob = rng.choice(verbs), rng.choice(("t-1", "t-2")), rng.choice("ab"), rng.choice(blobs)
    data = b""
    call: Callable[[], object]
    words: tuple[str, ...]
    match verb:
        case "put":
            there = twin.blobs.get(f"{sha256(blob)}.part", 0)
            offset = there if rng.random() < 0.9 else 3
            data = blob[offset:] if rng.random() < 0.8 else blob[offset : offset + 2]
            if is_damaged := rng.random() < 0.05 and len(data) > 1:
                data = data[:-1] + bytes([data[-1] ^ 1])
            call = partial(twin.put, sha256(blob), offset, len(blob), len(data), is_damaged=is_damaged)
            words = (sha256(blob), str(offset), str(len(blob)))
        case "unpack":
            words = (slot, sha256(rng.choice(blobs[:2])), sha256(blobs[2]), sha256(blobs[3]))
            call = partial(twin.unpack, *words)
        case "arm":
            digest = twin.slots.get(slot) or sha256(blobs[0])
            call, words = partial(twin.arm, slot, token, 20, digest), (slot, token, "20", digest)
        case "pick":
            call, words = twin.pick, ()
        case "abort":
            call, words = partial(twin.abort, token, "no more"), (token, "no more")
        case "forget":
            call, words = partial(twin.forget, sha256(blob)), (sha256(blob),)
        case _:
            alone = {"switch": twin.switch, "commit": twin.commit, "expire": twin.expire}
            call, words = partial(alone[verb], token), (token,)
    ran = script.run(verb, *words, data=data)
    expected = _expected(call, ran.stderr)
    assert ran.returncode == expected, (verb, words, ran, twin)
    assert script.asked() == noted.asked, (verb, words)
    noted.asked.clear()
    return verb if expected == 0 else f"{verb} refused"


def _expected(call: Callable[[], object], said: bytes) -> int:
    """The exit code that the twin's answer stands for."""
    try:
        call()
    except BusyError:
        assert b"busy: " in said, said
        return 3
    except RefusedError:
        assert b"busy: " not in said, said
        return 3
    except DamagedError:
        return 4
    return 0


def _beside_its_twin(folder: Path, seed: int, steps: int) -> set[str]:
    rng = random.Random(seed)
    script, noted = Script(folder), _Noted()
    up_s, boots = 0.0, 0
    twin = Twin(noted, now_s=lambda: up_s, boot="boot-0")
    blobs = [b"manifest one", b"manifest two", b"{}", LAYER]
    seen = set()
    for _ in range(steps):
        up_s += rng.choice((0.0, 0.0, 1.0, 7.0))
        if rng.random() < 0.03:
            boots, up_s = boots + 1, 1.0
            twin.boot = f"boot-{boots}"
        script.at(up_s, twin.boot)
        noted.now = rng.choice((ServiceRuns.RUNNING,) * 4 + tuple(ServiceRuns))
        script.service(noted.now.value)
        seen.add(_step(rng, script, twin, noted, blobs))
        assert _comparable(script.status()) == _comparable(twin.status())
    return seen


def test_the_script_and_its_twin_live_the_same(tmp_path: Path) -> None:
    seen: set[str] = set()
    for seed in range(2):
        seen |= _beside_its_twin(tmp_path / str(seed), seed, 80)
    assert {"arm", "switch", "pick", "commit", "abort", "expire", "unpack", "commit refused", "arm refused"} <= seen


@pytest.mark.nightly
def test_the_script_and_its_twin_live_the_same_at_length(tmp_path: Path) -> None:
    for seed in range(2, 60):
        _beside_its_twin(tmp_path / str(seed), seed, 200)


# Killed.

KILLER = """#!/bin/sh
# Stands before a program: from the Nth call on, the script that calls it is killed before or after it has run.
n=$(($(cat "$NOTES/calls") + 1)); echo $n >"$NOTES/calls"
[ $n -eq "$(cat "$NOTES/before")" ] && kill -9 $PPID && exit 1
PATH=${PATH#*:} NAME "$@"; code=$?
[ $n -eq "$(cat "$NOTES/after")" ] && kill -9 $PPID
exit $code
"""


def _killing(script: Script) -> None:
    folder = script.folder / "bin"
    folder.mkdir(exist_ok=True)
    for name in ("sync", "mv", "rm", "ln", "tar", "mkdir"):
        (folder / name).write_text(KILLER.replace("NAME", name))
        (folder / name).chmod(0o755)
    script.path = str(folder)


def _kill_at(script: Script, *, before: int = 0, after: int = 0) -> None:
    for name, value in {"calls": 0, "before": before, "after": after}.items():
        (script.folder / name).write_text(f"{value}\n")


def _killed_everywhere(tmp_path: Path, prepare: Any, words: Any) -> list[tuple[Script, int]]:
    """The card after each place at which ``words`` can be killed, the last time not at all."""
    origin = Script(tmp_path / "origin")
    said = words(prepare(origin))
    found = []
    for number in range(1, 40):
        for place in ("before", "after"):
            folder = tmp_path / f"{place}-{number}"
            shutil.copytree(origin.folder, folder, symlinks=True)
            script = Script.__new__(Script)
            script.folder, script.shell, script.path = folder, ("sh",), ""
            _killing(script)
            _kill_at(script, **{place: number})
            code = script.run(*said).returncode
            script.path = ""
            found.append((script, code))
            if code == 0:
                return found
    raise AssertionError("it was never let through")


def test_a_commit_that_is_killed_was_or_was_not(tmp_path: Path) -> None:
    def prepare(script: Script) -> str:
        second = _on_trial(script)
        script.run("pick", check=True)
        return second

    ended = set()
    for script, code in _killed_everywhere(tmp_path, prepare, lambda _: ("commit", "t-2")):
        state = script.status()
        ended.add(state.committed)
        assert state.slots[state.committed], "a slot that is whole"
        assert (state.committed == "b") == (state.trial is None), "one or the other"
        script.at(1.0, "boot-1")
        assert script.run("pick").stdout.decode().strip() == state.committed
        assert code in (0, -9)
    assert ended == {"a", "b"}


def test_an_unpacking_that_is_killed_leaves_no_slot_that_looks_whole(tmp_path: Path) -> None:
    def prepare(script: Script) -> tuple[str, ...]:
        first = _on_trial(script)
        script.run("abort", "t-2", "no", check=True)
        other = layer({"usr/": None, "usr/name": b"three"})
        for blob in (b"manifest of three", b"{}", other):
            script.run("put", sha256(blob), "0", str(len(blob)), data=blob, check=True)
        assert script.status().slots["b"] == first
        return (sha256(b"manifest of three"), sha256(b"{}"), sha256(other))

    for script, code in _killed_everywhere(tmp_path, prepare, lambda digests: ("unpack", "b", *digests)):
        state = script.status()
        name = script.folder / "slots/b/root/usr/name"
        if state.slots.get("b") == sha256(b"manifest of three"):
            assert name.read_bytes() == b"three"
        elif state.slots.get("b"):
            assert name.read_bytes() == b"one"
        assert (state.committed, script.run("pick").stdout) == ("a", b"a\n")
        assert code in (0, -9)


def test_a_pick_that_is_killed_starts_no_trial_twice(tmp_path: Path) -> None:
    for script, code in _killed_everywhere(tmp_path, _on_trial, lambda _: ("pick",)):
        if code == 0:
            assert script.status().running == "b"
        again = script.run("pick").stdout.decode().strip()
        state = script.status()
        assert state.running == again
        assert (again == "b") == (state.trial is not None)


@pytest.mark.parametrize("shell", [("dash",), ("bash", "--posix")])
def test_any_shell_will_do(tmp_path: Path, shell: tuple[str, ...]) -> None:
    if shutil.which(shell[0]) is None:
        pytest.fail(f"{shell[0]} is missing")
    script = Script(tmp_path / "card", shell=shell)
    _on_trial(script)
    script.run("pick", check=True)
    script.run("commit", "t-2", check=True)
    assert script.status().committed == "b"


def test_it_is_short_enough_to_be_read() -> None:
    assert len(SLOTCTL.read_text().splitlines()) < 300
