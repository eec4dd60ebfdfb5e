"""The admin queue of the simulated target: Connect, properties, Identify, logs, keep-alives and events."""

from __future__ import annotations

from tests.jbof.nvme.sim.rules import must
from tests.jbof.nvme.sim.subsystem import KEEP_ALIVE_UNIT, SUBSYSTEM_NQN
from tests.jbof.nvme.sim.target import INVALID_FIELD, Capsule, SimController, SimTarget

SEQUENCE_ERROR = 0x00C
INVALID_PARAMETERS = 0x4182
MAX_REQUESTS_PER_S = 40
NAMESPACES, ANA = (0x2, 0x00, 0x04), (0x2, 0x03, 0x0C)  # type, information, log page (Base Figures 148 to 152)
STRAY_EVENTS = (NAMESPACES, ANA, (0x7, 0x11, 0xC0), (0x0, 0x04, 0x01), (0x1, 0x01, 0x02))


class SimAdminTarget(SimTarget):
    def connect(self, capsule: Capsule) -> None:
        """Base Figures 546 and 547."""
        data = self.copy_in(capsule)
        if data is None:
            return
        must(capsule.link not in self.owners, "Connect twice")
        must(len(data) == 1024 and any(data[:16]), "Connect data")
        queue_id = capsule.number(42, 2)
        must(capsule.number(44, 2) == capsule.link.depth - 1, "SQSIZE")
        if data[256:512].rstrip(b"\0").decode() != SUBSYSTEM_NQN:
            self.respond(capsule, INVALID_PARAMETERS)
            return
        keep_alive_ms = capsule.number(48, 4)
        if queue_id == 0:
            must(keep_alive_ms > 0, "no keep-alive timeout")
            unit_ms = KEEP_ALIVE_UNIT * 100
            controller = SimController(self.next_controller, -(-keep_alive_ms // unit_ms) * unit_ms / 1000)
            self.next_controller = self.next_controller % 0xFFEF + 1
            self.controllers[controller.number] = controller
        else:
            found = self.controllers.get(int.from_bytes(data[16:18], "little"))
            if found is None:
                self.respond(capsule, INVALID_PARAMETERS)
                return
            must(queue_id not in found.links, "queue", queue_id, "is connected already")
            controller = found
        controller.links[queue_id] = capsule.link
        self.owners[capsule.link] = controller
        self.respond(capsule, result=controller.number)

    def admin(self, capsule: Capsule, controller: SimController) -> None:
        if capsule.opcode == 0x7F:
            self._property(capsule, controller)
        elif self.clock.now_s < controller.ready_s:
            self.respond(capsule, SEQUENCE_ERROR)
        elif capsule.opcode == 0x06:
            self._identify(capsule, controller)
        elif capsule.opcode == 0x02:
            self._log(capsule, controller)
        elif capsule.opcode == 0x09:
            granted = min(capsule.number(44, 4) & 0xFFFF, 3)
            self.respond(capsule, result=granted << 16 | granted if capsule.data[40] == 0x07 else 0)
            if capsule.data[40] == 0x0B:
                controller.events_wanted = capsule.number(44, 4)
        elif capsule.opcode == 0x18:
            controller.last_seen_s = self.clock.now_s
            self.seen["keep-alives"] += 1
            self.respond(capsule)
        else:
            must(capsule.opcode == 0x0C, "unknown admin opcode", hex(capsule.opcode))
            controller.request_times_s = [s for s in controller.request_times_s if s > self.clock.now_s - 1.0]
            controller.request_times_s.append(self.clock.now_s)
            must(len(controller.request_times_s) <= MAX_REQUESTS_PER_S, "a storm of event requests")
            controller.requests.append(capsule)
            must(len(controller.requests) <= min(3, self.subsystem.event_requests), "too many event requests")
            self._tell_event(controller)

    def _property(self, capsule: Capsule, controller: SimController) -> None:
        """Base Figures 41, 42, 552 and 554."""
        offset, now_s = capsule.number(44, 4), self.clock.now_s
        if capsule.data[4] == 0x00:
            must(offset == 0x14, "Property Set of", hex(offset))
            value = capsule.number(48, 4)
            must(value & 1 and value >> 16 & 0xFF == 0x46, "CC", hex(value))
            if value >> 14 & 3:
                controller.is_shut_down = True
            else:
                slow = self.chance(0.03, "controllers that are never ready")
                controller.ready_s = now_s + (1e9 if slow else self.rng.uniform(0.0, 0.2))
                controller.last_seen_s = now_s
                self.clock.after(controller.keep_alive_s, lambda: self._watch(controller))
            self.respond(capsule)
        elif offset == 0x00:
            self.respond(capsule, result=self.subsystem.cap())
        else:
            must(offset == 0x1C, "Property Get of", hex(offset))
            shutdown = 2 << 2 if controller.is_shut_down and self.rng.random() < 0.5 else 0
            self.respond(capsule, result=int(now_s >= controller.ready_s) | shutdown)

    def _watch(self, controller: SimController) -> None:
        if controller.is_gone:
            return
        since_s = max(controller.last_seen_s, min(self.silent_until_s, self.clock.now_s))  # in a silence, all stops
        rest_s = since_s + controller.keep_alive_s - self.clock.now_s
        if rest_s <= 0:
            self.seen["keep-alive timeouts"] += 1
            self.end(controller, "keep-alive timeout")
        else:
            self.clock.after(max(rest_s, 0.001), lambda: self._watch(controller))

    def _identify(self, capsule: Capsule, controller: SimController) -> None:
        subsystem, nsid = self.subsystem, capsule.nsid
        match capsule.data[40]:
            case 0x00:
                data = subsystem.identify_namespace(nsid)
            case 0x01:
                data = subsystem.identify_controller(controller.number)
            case 0x02:
                data = subsystem.namespace_list(nsid)
            case 0x03 if nsid in subsystem.namespaces:
                data = subsystem.namespace_descriptors(nsid)
            case 0x06 if subsystem.has_limits:
                data = subsystem.limits()
            case _:
                self.respond(capsule, INVALID_FIELD)
                return
        if self.copy_out(capsule, data):
            self.respond(capsule)

    def _log(self, capsule: Capsule, controller: SimController) -> None:
        length = (capsule.number(42, 2) + (capsule.number(44, 2) << 16) + 1) * 4
        must(capsule.data[41] & 0x80 == 0, "an event is retained")
        match capsule.data[40]:
            case 0x04:
                controller.masked.discard(NAMESPACES)
                data = b""
            case 0x0C:
                controller.masked.discard(ANA)
                data = self.subsystem.ana_log()
            case page:
                must(page == 0x01, "unknown log page", page)
                data = b""
        if self.copy_out(capsule, data[:length].ljust(length, b"\0")):
            self.respond(capsule)
        self._tell_event(controller)

    # ---- events --------------------------------------------------------------------------------------------------

    def changed(self, event: tuple[int, int, int]) -> None:
        for controller in self.controllers.values():
            if event not in controller.events:
                controller.events.append(event)
            self._tell_event(controller)

    def storm(self) -> None:
        """Events that are not held back until their logs are read, as they should be."""
        self.storm_until_s = self.clock.now_s + 2.0
        for controller in self.controllers.values():
            controller.events += self.rng.choices(STRAY_EVENTS, k=100)
            self._tell_event(controller)

    def _tell_event(self, controller: SimController) -> None:
        is_storm = self.clock.now_s < self.storm_until_s
        for event in list(controller.events):
            is_told = is_storm or event not in controller.masked
            if controller.requests and is_told and self.clock.now_s >= controller.ready_s:
                controller.events.remove(event)
                controller.masked.add(event)
                kind, information, page = event
                self.seen["events told"] += 1
                self.respond(controller.requests.pop(0), result=kind | information << 8 | page << 16)
