"""``mfctl events`` of all services of a context."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import click

from meshfusion.jbof.errors import MeshFusionError
from meshfusion.tools.mfctl.cluster import Answer, ask_all, end_with_errors, print_answers, tell_errors
from meshfusion.tools.mfctl.context_choice import Services
from meshfusion.tools.mfctl.context_types import Member
from meshfusion.tools.mfctl.events_command import HEADERS, event_line, event_object, event_row, service_events
from meshfusion.tools.mfctl.output import print_one_of_many, print_table, report_error
from meshfusion.tools.mfctl.service_access import calling, with_access

if TYPE_CHECKING:
    from meshfusion.dpu.api.event_types import Event

_WITHIN_S: Final = 15.0


def show_events_of_all(services: Services, pool_name: str, output_format: str, *, follow: bool) -> None:
    """``follow``: until the last service ends. The clocks of services may differ: order between them is by these."""
    if follow:
        _follow(services, pool_name, output_format)
        return
    answers = ask_all(services.members, lambda member: list(service_events(member, pool_name)), within_s=_WITHIN_S)
    if output_format != "table":
        print_answers(services, answers, lambda found: [event_object(event) for event in found], output_format)
    else:
        told = [(a.member.name, event) for a in answers if a.value is not None for event in a.value]
        told.sort(key=lambda one: one[1].time_s)
        print_table(("SERVICE", *HEADERS), [(name, *event_row(event)) for name, event in told])
        tell_errors(answers)
    end_with_errors(answers)


def _follow(services: Services, pool_name: str, output_format: str) -> None:
    width = max(len(member.name) for member in services.members)
    failed: list[Answer[Any]] = []
    for member, said in _all_that_come(services, pool_name):
        if isinstance(said, MeshFusionError):
            failed.append(Answer(member, error=said))
            if output_format == "table":
                tell_errors(failed[-1:])
            else:
                report_error(said, output_format)
        elif output_format == "table":
            click.echo(f"{member.name.ljust(width)}  {event_line(said)}")
        else:
            print_one_of_many({"service": member.name, **event_object(said)}, output_format)
    end_with_errors(failed)


def _all_that_come(services: Services, pool_name: str) -> Iterator[tuple[Member, Event | MeshFusionError]]:
    """As they come, until each service has ended or failed."""
    _ = calling().context  # read once, before several threads want it
    said: queue.SimpleQueue[tuple[Member, Event | BaseException | None]] = queue.SimpleQueue()

    def follow(member: Member) -> None:
        try:
            for event in service_events(member, pool_name, follow=True):
                said.put((member, event))
        except BaseException as error:  # told to the thread that prints
            said.put((member, error))
        else:
            said.put((member, None))

    for member in services.members:
        call = with_access(lambda member=member: follow(member))  # type: ignore[misc]
        threading.Thread(target=call, name=f"follow-{member.name}", daemon=True).start()
    left = len(services.members)
    while left:
        member, one = said.get()
        if one is None or isinstance(one, BaseException):
            left -= 1
        if isinstance(one, BaseException) and not isinstance(one, MeshFusionError):
            raise one
        if one is not None:
            yield member, one
