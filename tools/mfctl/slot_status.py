"""``mfctl dpu status``: what the slots of cards hold, what runs, and what is tried."""

from __future__ import annotations

import json
from typing import Any

import click

from meshfusion.dpu.image.edge.slot_card import SlotCard
from meshfusion.dpu.image.errors import CardError
from meshfusion.dpu.image.slots.card_state import SLOTS, CardState
from meshfusion.dpu.image.slots.types import Probed
from meshfusion.tools.mfctl.output import print_document, print_fields
from meshfusion.tools.mfctl.slot_jobs import open_slot_card
from meshfusion.tools.mfctl.slot_targets import SlotTarget


def show_status(targets: tuple[SlotTarget, ...], output_format: str) -> bool:
    """Whether all are reached, ready, and without a trial."""
    documents = [_document(target) for target in targets]
    if output_format != "table":
        print_document({"cards": documents}, output_format)
    else:
        for number, document in enumerate(documents):
            if number:
                click.echo()
            print_fields([(name.replace("_", " "), value) for name, value in _rows(document) if value != ""])
    return all(document["is_ready"] and document["trial"] is None for document in documents)


def _document(target: SlotTarget) -> dict[str, Any]:
    card = open_slot_card(target)
    try:
        state, seen = card.facts().state, card.probe()
        slots = [_slot(card, state, slot) for slot in SLOTS if slot in state.slots]
    except CardError as error:
        return {
            "card": target.name, "problem": error.message, "next_step": error.next_step, "is_ready": False,
            "trial": None,
        }  # fmt: skip
    finally:
        card.close()
    return _of(target.name, state, seen, slots)


def _of(name: str, state: CardState, seen: Probed, slots: list[dict[str, Any]]) -> dict[str, Any]:
    trial = state.trial
    return {
        "card": name,
        "service": state.service.value,
        "version": seen.version,
        "is_ready": seen.is_ready,
        "reason": seen.reason,
        "running": state.running if not state.service.is_down else "",
        "committed": state.committed,
        "trial": None if trial is None else {
            "slot": trial.slot, "token": trial.token, "is_started": trial.is_started, "left_s": trial.left_s,
        },
        "last_trial": state.last,
        "free_bytes": state.free_bytes,
        "copied_bytes": sum(state.blobs.values()),
        "slots": slots,
    }  # fmt: skip


def _slot(card: SlotCard, state: CardState, slot: str) -> dict[str, Any]:
    digest = state.slots[slot]
    found: dict[str, Any] = {}
    if digest:
        try:
            found = json.loads(card.manifest_of(slot))
        except ValueError:
            found = {}
    return {
        "slot": slot,
        "bundle_sha256": digest,
        "name": str(found.get("name", "")),
        "version": str(found.get("version", "")),
        "is_whole": bool(digest),
    }


def _rows(document: dict[str, Any]) -> list[tuple[str, object]]:
    if "problem" in document:
        return [(name, document[name]) for name in ("card", "problem", "next_step")]
    ready = "yes" if document["is_ready"] else f"no: {document['reason']}"
    rows = [("card", document["card"]), ("service", document["service"]), ("version", document["version"])]
    rows += [("ready", ready), ("runs from", document["running"]), ("committed", document["committed"])]
    trial = document["trial"]
    if trial is not None:
        started = "started" if trial["is_started"] else "not started"
        rows.append(("on trial", f"slot {trial['slot']}, {started}, {trial['left_s']:.0f} s left"))
    for slot in document["slots"]:
        what = f"{slot['name']} {slot['version']}, {slot['bundle_sha256'][:16]}" if slot["is_whole"] else "not whole"
        rows.append((f"slot {slot['slot']}", what))
    return [*rows, ("last trial", document["last_trial"])]
