"""Planted bugs. Each breaks one rule of the initiator as a mistake would; the simulation must find every one."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from meshfusion.jbof.errors import MeshFusionError
from meshfusion.jbof.nvme import transfer_requests, upkeep, windows
from meshfusion.jbof.nvme.association import Association, Phase
from meshfusion.jbof.nvme.async_events import async_event
from meshfusion.jbof.nvme.controller_effects import AssociationDead
from meshfusion.jbof.nvme.deallocation import split_ranges
from meshfusion.jbof.nvme.io_commands import write
from meshfusion.jbof.nvme.procedures import Conversations
from meshfusion.jbof.nvme.queue import QueuePair
from meshfusion.jbof.nvme.queue_effects import InDoubt, MemoryFree, NotSent
from meshfusion.jbof.nvme.reconnect import Reconnecting
from meshfusion.jbof.nvme.sgl import remote_data
from meshfusion.jbof.nvme.transfer_effects import TransferInDoubt
from meshfusion.jbof.nvme.transfers import Transfers
from meshfusion.jbof.nvme.transport import InvalidateKey, KeyInvalidated
from meshfusion.jbof.nvme.upkeep import EventRequests, KeepAlive, Rereading
from meshfusion.jbof.nvme.windows import KeyWindows

Effects = list[Any]

_kill = QueuePair.kill
_handle = QueuePair.handle
_tick = QueuePair.tick
_post = QueuePair._post
_finish = QueuePair._finish
_bind = KeyWindows.bind
_on_command = Transfers._on_command
_on_received = QueuePair._on_received
_init = QueuePair.__init__
_association_kill = Association.kill
_conversations_handle = Conversations.handle
_read = upkeep._read


def _frees_at_the_deadline(self: QueuePair, error: MeshFusionError) -> Effects:
    effects: Effects = _kill(self, error)
    owners, self._doubtful = self._doubtful, []
    return effects + [MemoryFree(owner) for owner in owners]


def _fails_what_is_in_doubt(self: QueuePair, error: MeshFusionError) -> Effects:
    effects: Effects = _kill(self, error)
    self._doubtful = []
    return [NotSent(*effect) if isinstance(effect, InDoubt) else effect for effect in effects]


def _frees_twice(self: QueuePair, error: MeshFusionError) -> Effects:
    effects: Effects = _kill(self, error)
    self._doubtful += self._doubtful[:1]
    return effects


def _takes_late_responses(self: QueuePair, now_s: float, event: Any) -> Effects:
    with patch.object(QueuePair, "tick", lambda *_: []):
        return _handle(self, now_s, event)


def _never_gives_up(self: QueuePair, now_s: float) -> Effects:
    self._deadlines.clear()
    return _tick(self, now_s)


def _does_not_wait_for_the_send(self: QueuePair, event: Any) -> Effects:
    for posted in self._posted.values():
        posted.sent = True
    return _on_received(self, event)


def _fills_the_queue(self: QueuePair, link: int, depth: int, **options: Any) -> None:
    _init(self, link, depth, **options)
    self._limit = depth


def _reuses_identifiers_at_once(self: QueuePair, item: Any) -> Any:
    self._next_id = 0
    return _post(self, item)


def _ignores_failures(self: Transfers, effect: Any) -> Effects:
    with patch.object(Transfers, "_fail", lambda *_, **__: None):
        return _on_command(self, effect)


def _calls_doubt_failure(self: Transfers, effect: Any) -> Effects:
    part = effect.owner
    effects = _on_command(self, effect)
    if any(isinstance(e, TransferInDoubt) for e in effects):
        part.transfer.in_doubt, part.transfer.under_way = False, 0
        return self._settle(part.transfer)
    return effects


def _reconnects_over_the_living(self: Association, now_s: float, error: MeshFusionError) -> Effects:
    effects: Effects = _association_kill(self, now_s, error)
    if self.phase is Phase.DYING and effects:
        self.phase = Phase.DEAD
        effects.append(AssociationDead(orderly=False))
    return effects


def _keeps_scratch(self: Conversations, now_s: float, effect: Any, ask: Any) -> Effects:
    return [] if isinstance(effect, MemoryFree) else _conversations_handle(self, now_s, effect, ask)


def _arms_events_once(self: EventRequests, now_s: float, completion: Any) -> Any:
    return async_event(completion.dword0) if completion.status.is_success else None


def _reads_no_access_states(wanted: Any, *args: Any) -> Any:
    return _read(wanted._replace(ana=False, inventory=wanted.inventory), *args)


def _forgets_what_changed_meanwhile(self: Rereading, now_s: float, inventory: Any) -> None:
    self._wanted = upkeep.Wanted()
    self._under_way = None


def _frees_while_the_key_lives(self: QueuePair, event: Any) -> Effects:
    effects = _on_received(self, event)
    for effect in list(effects):
        if isinstance(effect, InvalidateKey):
            effects.append(_finish(self, self._posted[effect.command_id]))
    return effects


def _takes_every_key_for_dead(self: QueuePair, event: Any) -> Effects:
    effects = _on_received(self, event)
    for effect in list(effects):
        if isinstance(effect, InvalidateKey):
            effects.remove(effect)
            effects += self._on_invalidated(KeyInvalidated(effect.link, effect.command_id))
    return effects


def _takes_any_invalidation(self: QueuePair, event: Any) -> Effects:
    """For its own."""
    command_id = int.from_bytes(event.data[12:14], "little")
    posted = self._posted.get(command_id)
    if posted is not None and posted.bind is not None and event.invalidated_key is not None:
        event = event._replace(invalidated_key=posted.bind.key)
    return _on_received(self, event)


def _uses_a_key_again(self: KeyWindows, memory: Any, *, is_written: bool) -> Any:
    with patch.object(windows, "next_key", lambda key: key):
        return _bind(self, memory, is_written=is_written)


def _opens_both_ways(self: KeyWindows, memory: Any, *, is_written: bool) -> Any:
    return _bind(self, memory, is_written=True)


def _opens_more(self: KeyWindows, memory: Any, *, is_written: bool) -> Any:
    return _bind(self, memory._replace(length_bytes=memory.length_bytes + 4096), is_written=is_written)


def _gives_windows_back_at_once(self: QueuePair, item: Any) -> Any:
    effect = _post(self, item)
    if effect.bind is not None:
        self._windows._free.appendleft(effect.bind.window)
    return effect


MUTANTS: dict[str, AbstractContextManager[Any]] = {
    "frees memory at the deadline": patch.object(QueuePair, "kill", _frees_at_the_deadline),
    "takes what is in doubt for not sent": patch.object(QueuePair, "kill", _fails_what_is_in_doubt),
    "frees memory twice": patch.object(QueuePair, "kill", _frees_twice),
    "takes a late response for success": patch.object(QueuePair, "handle", _takes_late_responses),
    "waits for ever": patch.object(QueuePair, "tick", _never_gives_up),
    "does not wait for the send": patch.object(QueuePair, "_on_received", _does_not_wait_for_the_send),
    "fills the queue to its depth": patch.object(QueuePair, "__init__", _fills_the_queue),
    "reuses identifiers at once": patch.object(QueuePair, "_post", _reuses_identifiers_at_once),
    "ignores failed commands": patch.object(Transfers, "_on_command", _ignores_failures),
    "ends a transfer in doubt as failed": patch.object(Transfers, "_on_command", _calls_doubt_failure),
    "ignores deadlines of what is not sent": patch.object(Transfers, "tick", lambda *_: []),
    "reconnects while queue pairs live": patch.object(Association, "kill", _reconnects_over_the_living),
    "keeps scratch memory of lost commands": patch.object(Conversations, "handle", _keeps_scratch),
    "sends no keep-alives": patch.object(KeepAlive, "start", lambda *_: None),
    "asks for events only once": patch.object(EventRequests, "finished", _arms_events_once),
    "asks for events without a pause": patch.object(upkeep, "EVENT_PAUSE_S", 0.0),
    "does not read access states again": patch.object(upkeep, "_read", _reads_no_access_states),
    "forgets what changed while it read": patch.object(Rereading, "end", _forgets_what_changed_meanwhile),
    "reconnects without a pause": patch.object(Reconnecting, "next_attempt_s", lambda _, now_s: now_s),
    "never gives a controller up": patch.object(Reconnecting, "lost", lambda *_: None),
    "frees memory while its key lives": patch.object(QueuePair, "_on_received", _frees_while_the_key_lives),
    "takes every key for dead": patch.object(QueuePair, "_on_received", _takes_every_key_for_dead),
    "takes any invalidation for its own": patch.object(QueuePair, "_on_received", _takes_any_invalidation),
    "uses a key again": patch.object(KeyWindows, "bind", _uses_a_key_again),
    "opens windows both ways": patch.object(KeyWindows, "bind", _opens_both_ways),
    "opens more than a command's memory": patch.object(KeyWindows, "bind", _opens_more),
    "binds a window again at once": patch.object(QueuePair, "_post", _gives_windows_back_at_once),
    "tells the region's number": patch.object(transfer_requests, "window_data", remote_data),
    "loses force unit access": patch.object(
        transfer_requests, "write", lambda *args, **_: write(*args, force_unit_access=False)
    ),
    "ignores the limits of deallocation": patch.object(
        transfer_requests, "split_ranges", lambda ranges, _: split_ranges(ranges, None)
    ),
}
