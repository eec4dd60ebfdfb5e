"""``mfctl top`` of all services of a context, side by side."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from typing import Any, Final

from meshfusion.tools.mfctl.cluster import Answer, answers_document, ask_all, end_with_errors, tell_errors
from meshfusion.tools.mfctl.cluster_status import UNKNOWN, standing, without_answer
from meshfusion.tools.mfctl.context_choice import Services
from meshfusion.tools.mfctl.context_types import Member
from meshfusion.tools.mfctl.output import format_bytes, print_document, print_one_of_many, print_table
from meshfusion.tools.mfctl.top_rates import Look, hit_share, rates, top_object
from meshfusion.tools.mfctl.top_watch import DEADLINE_S, Watched, begin_look, format_rate

_HEADERS: Final = (
    *("SERVICE", "LOOKUPS/S", "HITS", "SAVED/S", "CHUNKS", "BYTES"),
    *("HOLDERS", "LEASES", "DRIVES", "STANDS"),
)
_WITHIN_S: Final = 2 * DEADLINE_S + 1.0


def show_top_of_all(services: Services, pool_name: str, interval_s: float, output_format: str, *, once: bool) -> None:
    """Until it is interrupted. A service that does not answer is one line, and asked again with the next look; with
    ``once`` it is an error."""
    with ExitStack() as open_ones:
        watched = {
            member.name: open_ones.enter_context(closing(Watched(member, pool_name))) for member in services.members
        }

        def look(member: Member) -> Look:
            return watched[member.name].look()

        before = _by_name(ask_all(services.members, look, within_s=_WITHIN_S))
        is_first = True
        while True:
            time.sleep(interval_s)
            answers = ask_all(services.members, look, within_s=_WITHIN_S)
            _show(services, before, answers, output_format, is_first=is_first, is_only=once)
            if once:
                end_with_errors(answers)
                return
            before, is_first = _by_name(answers), False


def _by_name(answers: tuple[Answer[Look], ...]) -> dict[str, Look]:
    return {answer.member.name: answer.value for answer in answers if answer.value is not None}


def _show(
    services: Services, before: Mapping[str, Look], answers: tuple[Answer[Look], ...], output_format: str,
    *, is_first: bool, is_only: bool,
) -> None:  # fmt: skip
    if output_format == "table":
        begin_look(is_first=is_first)
        print_table(_HEADERS, [_row(before.get(answer.member.name), answer) for answer in answers])
        tell_errors(answers)
        return
    found: dict[str, Any] = {
        "context": services.context,
        # Of one that answers for the first time there is no look before this one, and so there are no rates.
        "services": answers_document(
            [Answer(a.member, None if a.value is None else (a.member, a.value), a.error) for a in answers],
            lambda one: top_object(before.get(one[0].name, one[1]), one[1]),
        ),
    }
    if is_only:
        print_document(found, output_format)
    else:
        print_one_of_many(found, output_format)


def _row(before: Look | None, answer: Answer[Look]) -> tuple[object, ...]:
    now = answer.value
    if now is None:
        return without_answer(answer, _HEADERS)
    found = None if before is None else rates(before, now)
    share = hit_share(found)
    status, troubled = now.status, [drive.number for drive in now.drives if drive.problem]
    return (
        answer.member.name,
        UNKNOWN if found is None else format_rate("lookups", found["lookups"]),
        UNKNOWN if share is None else f"{share:.1%}",
        UNKNOWN if found is None else format_rate("saved_bytes", found["saved_bytes"]),
        *(status.committed_chunk_count, format_bytes(status.committed_payload_bytes)),
        *(len(status.holders), status.lease_count),
        f"{len(now.drives)}, TROUBLE WITH {', '.join(map(str, troubled))}" if troubled else str(len(now.drives)),
        standing(status),
    )
