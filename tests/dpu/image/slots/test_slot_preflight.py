"""What speaks against an upgrade, and what a service's answers are worth."""

from __future__ import annotations

import json
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshfusion.dpu.formats import Formats
from meshfusion.dpu.image.errors import CardError, FaultKind
from meshfusion.dpu.image.slots.card_state import CardState, ServiceRuns, Trial, parse_status
from meshfusion.dpu.image.slots.preflight import CardFacts, image_problems, rollback_problems, steps, upgrade_problems
from meshfusion.dpu.image.slots.readiness import judged
from meshfusion.dpu.image.slots.service_image import ServiceImage, read_service_image
from meshfusion.dpu.image.slots.types import Deadlines, Phase, Probed
from meshfusion.dpu.image.slots.words import not_yet
from tests.dpu.image.slots.tiny_bundle import Signer, make_bundle, stand_in

GIB = 1 << 30
STATE = CardState(
    platform.machine(), "boot", ServiceRuns.RUNNING, "a", "a", 10 * GIB, slots={"a": "1" * 64, "b": "2" * 64},
    used_bytes={"a": GIB, "b": GIB},
)  # fmt: skip


@pytest.fixture
def image(tmp_path: Path) -> ServiceImage:
    signer = Signer.make(tmp_path)
    return read_service_image(make_bundle(tmp_path / "bundle", signer, "2", stand_in("2")), signer.path.read_bytes())


def _facts(image: ServiceImage, state: CardState = STATE, **changes: Any) -> CardFacts:
    return replace(CardFacts(state, image.formats, "127.0.0.1:9477"), **changes)


def _said(facts: CardFacts, image: ServiceImage, *, no_way_back: bool = False) -> str:
    return "\n".join(map(str, upgrade_problems(facts, image, no_way_back=no_way_back)))


def _with(image: ServiceImage, **formats: Any) -> ServiceImage:
    assert image.formats is not None
    return replace(image, formats=image.formats.model_copy(update=formats))


def test_nothing_speaks_against_a_good_one(image: ServiceImage) -> None:
    assert _said(_facts(image), image) == ""
    assert image_problems(image) == []
    assert _said(_facts(image, replace(STATE, committed="", running=""), former=None), image) == "", "the first one"


def test_another_architecture(image: ServiceImage) -> None:
    said = _said(_facts(image, replace(STATE, machine="riscv64")), image)
    assert f"bundle architecture = {platform.machine()!r}: is not that of the card; take the bundle for riscv64" in said


def test_space_counts_what_is_freed_and_what_is_there(image: ServiceImage) -> None:
    needed = image.copied_bytes + image.unpacked_bytes + (64 << 20)
    short = replace(STATE, free_bytes=needed - 1, used_bytes={})
    assert "free space" in _said(_facts(image, short), image)
    assert "free 1 bytes more" in _said(_facts(image, short), image)
    for enough in (
        replace(short, free_bytes=needed),
        replace(short, used_bytes={"b": 1}),
        replace(short, blobs={"f" * 64: 1}),
        replace(short, blobs={f"{image.wanted.layers[0].digest}.part": 1}),
        replace(short, free_bytes=0, slots={"a": "1" * 64, "b": image.wanted.digest}),
        replace(short, free_bytes=0, slots={"a": image.wanted.digest}),
    ):
        assert _said(_facts(image, enough), image) == ""
    assert "free space" in _said(_facts(image, replace(short, used_bytes={"a": GIB})), image), "of the committed one"


def test_formats_decide_whether_there_is_a_way_back(image: ServiceImage) -> None:
    facts = _facts(image)
    forward = _with(image, medium=99, reads_medium=[99])
    assert "cannot be read by 2" in _said(facts, forward)
    assert "cannot be read by 2" in _said(facts, forward, no_way_back=True), "no consent helps"
    no_back = _with(image, index=99, reads_index=[*image.formats.reads_index, 99])  # type: ignore[union-attr]
    assert "could not read it afterwards" in _said(facts, no_back)
    assert _said(facts, no_back, no_way_back=True) == ""
    silent = replace(image, formats=None)
    assert "cannot be told of the new service" in _said(facts, silent)
    assert "cannot be told of the committed service" in _said(replace(facts, former=None), image)
    assert _said(facts, silent, no_way_back=True) == ""


def test_telemetry_is_needed(image: ServiceImage) -> None:
    assert "telemetry.listen: is not set" in _said(_facts(image, telemetry=""), image)
    assert "cannot be reached through ssh" in _said(_facts(image, telemetry="unix:///run/t"), image)
    assert "telemetry.probe = False: is off" in _said(_facts(image, is_probed=False), image)


def test_rollbacks(image: ServiceImage) -> None:
    def said(state: CardState, other: Formats | None = image.formats) -> str:
        return "\n".join(map(str, rollback_problems(_facts(image, state), other, no_way_back=False)))

    assert said(STATE) == ""
    assert "none is committed" in said(replace(STATE, committed=""))
    assert "slot b: holds nothing" in said(replace(STATE, slots={"a": "1" * 64, "b": ""}))
    assert "cannot be told of the new service" in said(STATE, None)
    assert said(replace(STATE, trial=Trial("b", "t", True, 5.0), slots={"a": "1"}), None) == "", "it is ended"


def test_steps_leave_out_what_is_there(image: ServiceImage) -> None:
    def phases(state: CardState) -> list[str]:
        planned = steps(state, image.wanted, Deadlines(), drain="", steady_s=40)
        return [phase for phase, _, _ in planned]

    names = [phase.value for phase in Phase]
    whole = phases(STATE)
    assert whole == names[names.index("copying") : names.index("committing") + 1]
    assert phases(replace(STATE, slots={"a": "1", "b": image.wanted.digest})) == whole[2:]
    assert phases(replace(STATE, slots={"a": image.wanted.digest})) == ["done"]


# Readiness. The bodies are those of dpu/telemetry/health.py.

READY = {"status": "ok", "reasons": [], "probe_age_s": 1.0, "probe_seconds": 0.1, "written_age_s": 5.0}
FAILING = READY | {"status": "failing", "reasons": ["read: the medium"], "written_age_s": None}


@pytest.mark.parametrize(
    ("ready", "status", "expected", "reason"),
    [
        (READY, {"version": "2"}, Probed(True, True, "2"), ""),
        (READY | {"written_age_s": None}, {"version": "2"}, Probed(True, False, "2"), "has not written a chunk"),
        (READY, {"version": "1"}, Probed(True, True, "1"), "version 1 answers, and 2 was started"),
        (READY, None, Probed(True, True, ""), "does not tell its version"),
        (FAILING, {"version": "2"}, Probed(False, False, "2", "it says failing: read: the medium"), "the medium"),
        (None, None, Probed(False, False, "", "the service does not answer"), "does not answer"),
        (
            {"status": "ok", "reasons": [], "pools": {"red": READY, "blue": READY}}, {"version": "2"},
            Probed(True, True, "2"), "",
        ),
        (
            {"status": "ok", "reasons": [], "pools": {"red": READY, "blue": READY | {"written_age_s": None}}},
            {"version": "2"}, Probed(True, False, "2"), "has not written a chunk",
        ),
    ],
)  # fmt: skip
def test_what_a_service_says(ready: Any, status: Any, expected: Probed, reason: str) -> None:
    def body(value: Any) -> bytes | None:
        return None if value is None else json.dumps(value).encode()

    found = judged(body(ready), body(status))
    assert found == expected
    assert (reason in not_yet(found, "2")) if reason else not_yet(found, "2") == ""


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"null", b"\xff"])
def test_what_is_no_answer(body: bytes) -> None:
    assert not judged(body, body).is_ready


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (("protocol=1", "protocol=2"), FaultKind.REFUSED),
        (("protocol=1", ""), FaultKind.BROKEN),
        (("service=running", "service=dancing"), FaultKind.BROKEN),
        (("phase=armed", "phase=perhaps"), FaultKind.BROKEN),
        (("free_kib=7", "free_kib=much"), FaultKind.BROKEN),
    ],
)
def test_a_status_that_is_not_understood(change: tuple[str, str], kind: FaultKind) -> None:
    text = (
        "protocol=1\nmachine=aarch64\nboot=x\nservice=running\nrunning=a\ncommitted=a\ntrial=b\ntoken=t\nphase=armed\n"
        "left=5\nfree_kib=7\nslot_a=11\nused_kib_a=3\n"
    )
    state = parse_status(text)
    assert (state.trial, state.free_bytes, state.slots) == (Trial("b", "t", False, 5.0), 7168, {"a": "11"})
    with pytest.raises(CardError) as raised:
        parse_status(text.replace(*change))
    assert raised.value.kind is kind
    assert raised.value.next_step
