"""The options of ``mfctl plan``: one for each quantity that can be given, and those that describe the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from meshfusion.tools.mfctl.numbers import FiniteRange
from meshfusion.tools.plan.formula import Unit
from meshfusion.tools.plan.given import GIVEN, Given, Kind

F = TypeVar("F", bound=Callable[..., Any])

_MOST: Final = 1e9
_MOST_COUNT: Final = 1_000_000
_GIGA: Final = 1e9
_BITS: Final = 8
CHUNK_MIN_BYTES, CHUNK_MAX_BYTES = 4096, 1 << 30
"""Of chunk_min_bytes in the connector's configuration."""


def _size(value: Any) -> int:
    """``4GiB`` -> bytes."""
    from meshfusion.jbof.sizes import parse_size_bytes

    try:
        return parse_size_bytes(value)
    except ValueError as error:
        raise click.BadParameter(f"{error}.") from error


def _chunk_size(value: Any) -> int:
    size_bytes = _size(value)
    if not CHUNK_MIN_BYTES <= size_bytes <= CHUNK_MAX_BYTES:
        raise click.BadParameter(f"{value!r} is not from 4KiB to 1GiB, as the connector takes it.")
    return size_bytes


class _Rate(FiniteRange):
    """``6`` of ``unit_bytes_per_s`` each -> bytes a second."""

    def __init__(self, unit_bytes_per_s: float) -> None:
        super().__init__(0.001, 1e6)
        self._unit_bytes_per_s = unit_bytes_per_s

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        return super().convert(value, param, ctx) * self._unit_bytes_per_s


_UNITS: Final = {Unit.HOURS: "HOURS", Unit.SECONDS: "SECONDS", Unit.YEARS: "YEARS", Unit.TOKENS: "TOKENS"}
_TYPES: Final[dict[Kind, Any]] = {
    Kind.COUNT: click.IntRange(1, _MOST_COUNT),
    Kind.SIZE: _size,
    Kind.GIGABYTES_PER_S: _Rate(_GIGA),
    Kind.GIGABITS_PER_S: _Rate(_GIGA / _BITS),
    Kind.SHARE: FiniteRange(0, 1),
    Kind.PART: FiniteRange(0, 0.5),
    Kind.AMOUNT: FiniteRange(0, _MOST),
    Kind.POSITIVE: FiniteRange(0, _MOST, min_open=True),
    Kind.FACTOR: FiniteRange(1, 100),
}


def model_options(command: F) -> F:
    """Of the engine that serves the model, as it would be started, and of its connector."""
    options = (
        click.option(
            "--kv-bytes-per-token", type=_size, metavar="SIZE",
            help="Instead of MODEL: KV of one token, all layers and ranks together, of full attention or MLA.",
        ),
        click.option(
            "--replicated", is_flag=True,
            help="With --kv-bytes-per-token: all ranks hold the same of it, as with MLA.",
        ),
        click.option(
            "--block-size", type=click.IntRange(1, 65_536), metavar="N",
            help="Tokens of a block of the engine. Without it MODEL's are those of the engine's own choice on this "
            "machine; with --kv-bytes-per-token they are 16.",
        ),
        click.option(
            "--tensor-parallel-size", "rank_count", type=click.IntRange(1, 1024), default=1, show_default=True,
            metavar="N", help="Ranks of each engine.",
        ),
        click.option("--dtype", default="auto", show_default=True, metavar="NAME", help="The engine's option."),
        click.option(
            "--kv-cache-dtype", default="auto", show_default=True, metavar="NAME", help="The engine's option."
        ),
        click.option(
            "--max-model-len", type=click.IntRange(1), metavar="N", help="The engine's option; without it MODEL's own."
        ),
        click.option(
            "--chunk-min-bytes", type=_chunk_size, default="1MiB", show_default=True, metavar="SIZE",
            help="As in the connector's configuration.",
        ),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def given_options(command: F) -> F:
    """One for each of :data:`~meshfusion.tools.plan.given.GIVEN`; the command gets their names."""
    for entry in reversed(GIVEN):
        command = click.option(
            entry.option, entry.name, type=_TYPES[entry.kind], metavar=_metavar(entry), help=_help(entry)
        )(command)
    return command


def _metavar(entry: Given) -> str:
    """The unit, where the kind does not say it."""
    is_told = entry.kind not in (Kind.AMOUNT, Kind.POSITIVE)
    return entry.kind.value.split(",")[0] if is_told else _UNITS.get(entry.unit, "NUMBER")


def default_text(entry: Given) -> str:
    """What counts where the option is not given, and why; empty where nothing does."""
    if entry.default is None:
        return entry.why_default
    if entry.kind is Kind.SIZE:
        from meshfusion.jbof.sizes import format_size

        shown = format_size(entry.default)
    else:
        shown = "no bound" if entry.default == float("inf") else f"{entry.default:g}"
    return f"{shown}, {entry.why_default}" if entry.why_default else shown


def _help(entry: Given) -> str:
    shown = f"{entry.title[:1].upper()}{entry.title[1:]}."
    default = default_text(entry)
    return f"{shown} Without it {default}." if default else shown
