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


class SizeParameter(click.ParamType[int]):
    """``4GiB`` -> bytes, of which Kubernetes is told whole MiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from meshfusion.jbof.sizes import parse_size_bytes

        if isinstance(value, int):
            return value
        try:
            size_bytes = parse_size_bytes(value)
        except ValueError as error:
            self.fail(f"{error}.", param, ctx)
        if size_bytes < _MIB:
            self.fail(f"{value} is less than 1MiB.", param, ctx)
        return size_bytes


class _NodeName(click.ParamType[str]):
    name = "name"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        if not is_node_name(text):
            self.fail(f"{text!r} is no name of a node: letters a-z, digits, hyphens and dots.", param, ctx)
        return text


class _Namespace(click.ParamType[str]):
    name = "name"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        if not is_namespace(text):
            self.fail(f"{text!r} is no namespace: letters a-z, digits and hyphens, 63 at most.", param, ctx)
        return text


NODE: Final = _NodeName()


def namespace_option(command: F) -> F:
    return click.option(
        "--namespace", type=_Namespace(), default="meshfusion", show_default=True, metavar="NAME",
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
