"""Kinds of values that ``mfctl k8s`` takes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from meshfusion.tools.k8s.names import is_namespace, is_node_name

F = TypeVar("F", bound=Callable[..., Any])

_MIB: Final = 1 << 20
_LABEL_KEY: Final = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE: Final = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")


def size(context: click.Context, parameter: click.Parameter, value: str) -> int:
    """``4GiB`` -> bytes, of which Kubernetes is told whole MiB."""
    from meshfusion.jbof.sizes import parse_size_bytes

    try:
        size_bytes = parse_size_bytes(value)
    except ValueError as error:
        raise click.BadParameter(f"{error}.") from error
    if size_bytes < _MIB:
        raise click.BadParameter(f"{value} is less than 1MiB.")
    return size_bytes


def node_name(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None and not is_node_name(value):
        raise click.BadParameter(f"{value!r} is no name of a node: letters a-z, digits, hyphens and dots.")
    return value


def _namespace(context: click.Context, parameter: click.Parameter, value: str) -> str:
    if not is_namespace(value):
        raise click.BadParameter(f"{value!r} is no namespace: letters a-z, digits and hyphens, 63 at most.")
    return value


def namespace_option(command: F) -> F:
    return click.option(
        "--namespace", callback=_namespace, default="meshfusion", show_default=True, metavar="NAME",
        help="Where the objects are.",
    )(command)  # fmt: skip


def label(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """``KEY=VALUE``, several times."""
    found: dict[str, str] = {}
    for text in values:
        key, equals, value = text.partition("=")
        if not equals or not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
            raise click.BadParameter(f"{text!r} is no label: write for example release=prometheus.")
        found[key] = value
    return found
