"""Asking all services of a context at once: each answers, or fails, for itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import click

from meshfusion.jbof.errors import MeshFusionError, ServiceUnavailableError
from meshfusion.tools.mfctl.context_choice import Services
from meshfusion.tools.mfctl.context_types import Member
from meshfusion.tools.mfctl.exit_codes import EXIT_UNREACHABLE, exit_code
from meshfusion.tools.mfctl.output import error_object, print_document
from meshfusion.tools.mfctl.service_access import calling, with_access

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Answer(Generic[T_co]):
    """Of one service: either is None."""

    member: Member
    value: T_co | None = None
    error: MeshFusionError | None = None


def ask_all(members: Sequence[Member], ask: Callable[[Member], T], *, within_s: float) -> tuple[Answer[T], ...]:
    """``ask`` is called in a thread for each; one that takes longer than ``within_s`` did not answer.

    A defect in ``ask`` is raised here. An interruption waits for none of them.
    """
    _ = calling().context  # read once, before several threads want it
    outcomes: dict[str, T | BaseException] = {}

    def asked(member: Member) -> Callable[[], None]:
        def run() -> None:
            try:
                outcomes[member.name] = ask(member)
            except BaseException as error:  # told below, of whichever kind it is
                outcomes[member.name] = error

        return with_access(run)

    threads = [threading.Thread(target=asked(member), name=f"ask-{member.name}", daemon=True) for member in members]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + within_s
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    return tuple(_answer(member, outcomes, within_s) for member in members)


def _answer(member: Member, outcomes: dict[str, T | BaseException], within_s: float) -> Answer[T]:
    if member.name not in outcomes:
        late = ServiceUnavailableError(
            f"the chunk service at {member.address} did not answer within {within_s:g} s",
            next_step="See whether it hangs, or is far from here: mfctl service status --service ADDRESS.",
        )
        return Answer(member, error=late)
    outcome = outcomes[member.name]
    if isinstance(outcome, MeshFusionError):
        return Answer(member, error=outcome)
    if isinstance(outcome, BaseException):
        raise outcome
    return Answer(member, outcome)


def print_answers(
    services: Services, answers: Sequence[Answer[T]], document: Callable[[T], Any], output_format: str
) -> None:
    """For programs: each service by its name, with what it answered, or the error."""
    print_document({"context": services.context, "services": answers_document(answers, document)}, output_format)


def answers_document(answers: Sequence[Answer[T]], document: Callable[[T], Any]) -> list[dict[str, Any]]:
    return [
        {
            "service": answer.member.name,
            "address": answer.member.address,
            "answer": None if answer.value is None else document(answer.value),
            "error": None if answer.error is None else error_object(answer.error),
        }
        for answer in answers
    ]


def tell_errors(answers: Sequence[Answer[Any]]) -> None:
    """For people, on stderr: who did not answer, why, and what to do."""
    for answer in answers:
        if answer.error is not None:
            click.echo(f"error: {answer.member.name}: {answer.error}", err=True)


def end_with_errors(answers: Sequence[Answer[Any]]) -> None:
    """Ends the command with an exit code that is not 0 when a service did not answer: 5 when one cannot be reached."""
    codes = [exit_code(answer.error) for answer in answers if answer.error is not None]
    if codes:
        raise click.exceptions.Exit(EXIT_UNREACHABLE if EXIT_UNREACHABLE in codes else codes[0])
