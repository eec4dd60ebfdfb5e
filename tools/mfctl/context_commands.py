"""``mfctl context``: list, show, use, set, remove."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from meshfusion.jbof.errors import ConfigError
from meshfusion.tools.mfctl.completing import context_names
from meshfusion.tools.mfctl.context_file import (
    change_contexts,
    context_document,
    contexts_path,
    read_contexts,
)
from meshfusion.tools.mfctl.context_types import Access, Contexts, Member, ServiceContext
from meshfusion.tools.mfctl.output import format_option, print_document, print_fields, print_table
from meshfusion.tools.mfctl.service_access import calling

_FILE = click.Path(path_type=Path, readable=False)
_NAME = click.argument("name", shell_complete=context_names)


@click.group()
def context() -> None:
    """Name services once, with the files to call them with, instead of on each line.

    Contexts are in $MFCTL_CONFIG, or else in mfctl/contexts.yaml below $XDG_CONFIG_HOME or ~/.config: addresses and
    paths, no secrets. A command that names no service takes that of the current context, or of mfctl --context NAME.
    """


@context.command("list")
@format_option
def list_command(output_format: str) -> None:
    """Show all contexts, and which is the current one."""
    contexts = _read()
    if output_format != "table":
        rows = [
            {"name": found.name, "current": found.name == contexts.current, "services": _addresses(found)}
            for found in contexts.by_name.values()
        ]
        print_document({"contexts": rows}, output_format)
        return
    print_table(
        ["CURRENT", "NAME", "SERVICES"],
        [
            ("*" if found.name == contexts.current else "", found.name, _summary(found))
            for found in contexts.by_name.values()
        ],
    )
    if not contexts.by_name:
        click.echo(f"there are none yet in {_path()}: mfctl context set NAME --service ADDRESS", err=True)


@context.command()
@click.argument("name", required=False, shell_complete=context_names)
@format_option
def show(name: str | None, output_format: str) -> None:
    """Show the context NAME, or the current one, and what is wrong with its files. Exits 1 when something is."""
    found = calling().context if name is None else _known(_read(), name)
    if found is None:
        raise ConfigError("no context is the current one", next_step="Name one, or choose it: mfctl context use NAME.")
    looks = [(member, *_look_at_files(member)) for member in found.members]
    if output_format != "table":
        services = [
            {**_plain(member), "notes": list(notes), "problems": list(problems)} for member, notes, problems in looks
        ]
        print_document({"name": found.name, "cluster": found.is_cluster, "services": services}, output_format)
    else:
        print_fields([("context", found.name), ("file", _path())])
        for member, notes, problems in looks:
            click.echo()
            fields = [(key.replace("_", " "), value) for key, value in _plain(member).items()]
            print_fields([*fields, *(("note", note) for note in notes), *(("PROBLEM", text) for text in problems)])
    if any(problems for _, _, problems in looks):
        raise click.exceptions.Exit(1)


@context.command()
@_NAME
@format_option
def use(name: str, output_format: str) -> None:
    """Make NAME the current context."""

    def change(contexts: Contexts) -> Contexts:
        return Contexts(_known(contexts, name).name, contexts.by_name)

    found = change_contexts(_path(), change).by_name[name]
    if output_format != "table":
        print_document({"current": name, "services": _addresses(found)}, output_format)
    else:
        click.echo(f"current context: {name}, {_summary(found)}")


@context.command("set")
@_NAME
@click.option("--service", "address", metavar="ADDRESS", help="Of one service: unix:///path or host:port.")
@click.option(
    "--member", "members", multiple=True, metavar="NAME=ADDRESS",
    help="Of a cluster: one of its services, and what to call it; may be given several times.",
)  # fmt: skip
@click.option("--ca", type=_FILE, metavar="FILE", help="CA of the services' certificates.")
@click.option("--certificate", type=_FILE, metavar="FILE", help="Certificate to show to them.")
@click.option("--key", type=_FILE, metavar="FILE", help="Its key.")
@click.option(
    "--server-name", metavar="NAME", help="What their certificates name, where that is not the address's host."
)
@click.option("--token-file", type=_FILE, metavar="FILE", help="File with the token to show to them.")
@click.option("--use", "is_current", is_flag=True, help="Make it the current one, too.")
@format_option
def set_command(
    name: str, address: str | None, members: tuple[str, ...], is_current: bool, output_format: str, **files: Any
) -> None:
    """Write the context NAME; one of that name is replaced as a whole.

    The files are named, not copied, and need not be here yet: mfctl context show looks at them. What a single service
    of a cluster has for itself is written into the file by hand, below its address.
    """
    if (address is None) == (not members):
        raise click.UsageError("Name either --service ADDRESS, or each service of a cluster by --member NAME=ADDRESS.")
    absolute: dict[str, Any] = {k: Path(os.path.abspath(v)) if isinstance(v, Path) else v for k, v in files.items()}
    shared = Access(**absolute)
    of_members = tuple(map(_member, members)) or (Member(name, address or "", shared),)
    if len({member.name for member in of_members}) != len(of_members):
        raise click.UsageError("--member: a name stands twice.")
    made = ServiceContext(name, of_members, is_cluster=bool(members), shared=shared)
    was_there = False

    def change(contexts: Contexts) -> Contexts:
        nonlocal was_there
        was_there = name in contexts.by_name
        changed = contexts.with_context(made)
        return Contexts(name, changed.by_name) if is_current else changed

    contexts = change_contexts(_path(), change)
    if output_format != "table":
        document = {"name": name, "replaced": was_there, "current": contexts.current == name}
        print_document(document | context_document(made), output_format)
        return
    click.echo(f"{'replaced' if was_there else 'wrote'} context {name} in {_path()}: {_summary(made)}")
    if contexts.current != name:
        click.echo(f"to have commands take it: mfctl context use {name}", err=True)


@context.command()
@_NAME
@format_option
def remove(name: str, output_format: str) -> None:
    """Remove the context NAME. Its services and files stay as they are."""
    removed: ServiceContext | None = None
    was_current = False

    def change(contexts: Contexts) -> Contexts:
        nonlocal removed, was_current
        removed, was_current = _known(contexts, name), contexts.current == name
        return contexts.without(name)

    change_contexts(_path(), change)
    assert removed is not None, "else it was refused"
    if output_format != "table":
        print_document({"removed": name, "was_current": was_current, **context_document(removed)}, output_format)
        return
    click.echo(f"removed context {name}, which was {_summary(removed)}")
    if was_current:
        click.echo("it was the current one: there is none now", err=True)


def _path() -> Path:
    return contexts_path(os.environ)


def _read() -> Contexts:
    return read_contexts(_path())


def _known(contexts: Contexts, name: str) -> ServiceContext:
    found = contexts.by_name.get(name)
    if found is None:
        known = ", ".join(contexts.by_name) or "there is none yet"
        raise ConfigError(
            f"there is no context {name!r}: {known}", next_step="Name one of them, or make it: mfctl context set."
        )
    return found


def _member(text: str) -> Member:
    name, equals, address = text.partition("=")
    if not equals:
        raise click.UsageError(f"--member {text!r} is not NAME=ADDRESS, such as dpu-1=dpu-1.example:7000.")
    return Member(name, address)


def _summary(context: ServiceContext) -> str:
    if not context.is_cluster:
        return context.members[0].address
    return ", ".join(f"{member.name}={member.address}" for member in context.members)


def _addresses(context: ServiceContext) -> list[dict[str, str]]:
    return [{"service": member.name, "address": member.address} for member in context.members]


def _plain(member: Member) -> dict[str, str]:
    files = {key: str(value) for key, value in member.access.given().items()}
    return {"service": member.name, "address": member.address, **files}


def _look_at_files(member: Member) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What is to be known of them, and what is wrong with them."""
    from meshfusion.dpu.api.security.client_security import ClientSecurity, check_client_files

    notes, problems = check_client_files(ClientSecurity(**member.access.given()), datetime.now(UTC))
    told = [f"{one.field} = {getattr(member.access, one.field)}: {one.problem}; {one.fix}" for one in problems]
    return notes, tuple(told)
