"""How ``mfctl plan`` shows what it found."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import click

from meshfusion.host.kv.chunk_form import ChunkForm
from meshfusion.tools.mfctl.output import format_bytes, print_document, print_fields
from meshfusion.tools.model_kv import ModelKv, to_object
from meshfusion.tools.plan.checks import Check
from meshfusion.tools.plan.formula import Formula, Unit
from meshfusion.tools.plan.given import BY_NAME, GIVEN, Given
from meshfusion.tools.plan.plan import DERIVED, FORMULAS, SECTIONS, Plan
from meshfusion.tools.plan.replay import Replay


@dataclass(frozen=True, slots=True)
class Shown:
    """``model`` None: its bytes were given. ``block_size``: that was asked for. ``replay`` None: no trace."""

    plan: Plan
    model: ModelKv | None
    block_size: int | None
    form: ChunkForm
    replay: Replay | None
    traces: tuple[str, ...]

    @property
    def notes(self) -> Iterator[str]:
        if self.model is not None:
            engine = f"vLLM {self.model.engine} for {self.model.platform}"
            yield f"blocks and pages are those of {engine}; on another platform, name its --block-size"
            made = sorted({plan.block_tokens for plan in self.form.plans})
            if self.block_size is not None and made != [self.block_size]:
                yield f"{engine} makes blocks of {', '.join(map(str, made))} tokens, not of {self.block_size}"
            yield from (f"{engine}: {line}" for line in self.model.refusals)
        if any(plan.is_snapshot for plan in self.form.plans):
            yield "of states a snapshot is counted for each chunk: engines keep fewer, see docs/models.md"
        if self.replay is not None:
            yield f"hits and writes are those of the learned policy on {', '.join(self.traces)}, simulated"

    def origin(self, entry: Given) -> str:
        if self.replay is not None and entry.name in self.replay.given():
            return "from the trace"
        is_default = entry.name in self.plan.defaults
        return ("default" + (f": {entry.why_default}" if entry.why_default else "")) if is_default else "given"


def print_plan(shown: Shown, explain: bool, output_format: str) -> None:
    if output_format != "table":
        print_document(_object(shown), output_format)
        return
    _print_sections(shown, explain)
    _print_checks(shown)
    _print_lacking(shown.plan)
    for note in shown.notes:
        click.echo(f"note: {note}")


def shown_value(value: Any, unit: Unit) -> str:
    """For people."""
    if isinstance(value, float) and math.isinf(value):
        return "no bound"
    match unit:
        case Unit.BYTES:
            return format_bytes(round(value))
        case Unit.BYTES_PER_S:
            return f"{value / 1e9:.3g} GB/s" if value >= 1e9 else f"{value / 1e6:.3g} MB/s"
        case Unit.SHARE:
            return f"{value:.3g}"
        case Unit.PER_DAY:
            return f"{value:.2f} a day"
        case Unit.TOKENS | Unit.TOKENS_PER_S | Unit.PER_S:
            shown = f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
            return shown if unit is Unit.TOKENS else f"{shown} {unit.value}"
        case Unit.SECONDS:
            return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"
        case Unit.COUNT:
            return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
    return f"{value:,.1f} {unit.value}"


# ---- tables ------------------------------------------------------------------------------------------------------


def _print_sections(shown: Shown, explain: bool) -> None:
    values = shown.plan.values
    click.echo("GIVEN")
    print_fields(
        (f"  {entry.title}", f"{shown_value(values[entry.name], entry.unit)}  ({shown.origin(entry)})")
        for entry in _stated(shown.plan)
    )
    for title, formulas in SECTIONS.items():
        known = [entry for entry in formulas if entry.name in values and entry not in _stated_formulas(shown.plan)]
        if not known:
            continue
        click.echo()
        click.echo(title.upper())
        if explain:
            _explain(known, shown.plan)
        else:
            print_fields((f"  {entry.title}", shown_value(values[entry.name], entry.unit)) for entry in known)


def _stated(plan: Plan) -> list[Given]:
    """What was stated, and the defaults that count."""
    stated = plan.values.keys() - plan.computed - (plan.defaults - plan.used)
    return [entry for entry in GIVEN if entry.name in stated]


def _stated_formulas(plan: Plan) -> list[Formula]:
    """Of what is shown as given."""
    return [entry for entry in FORMULAS if entry.name in BY_NAME and entry.name not in plan.computed]


def _explain(formulas: list[Formula], plan: Plan) -> None:
    for entry in formulas:
        click.echo(f"  {entry.title}: {shown_value(plan.values[entry.name], entry.unit)}")
        if entry.name not in plan.computed:
            click.echo(f"      {entry.name}: found on the trace")
            continue
        click.echo(f"      {entry.name} = {entry.text}")
        for name, value in entry.constants.items():
            click.echo(f"      {name} = {value:,}")
        click.echo(f"      {entry.source}")


def _print_checks(shown: Shown) -> None:
    plan = shown.plan
    if not plan.checks and not plan.problems:
        return
    click.echo()
    click.echo("IS IT ENOUGH")
    if plan.checks:
        print_fields((f"  {check.rule.title}", check_text(check)) for check in plan.checks)
    for check in plan.checks:
        if not check.is_enough:
            click.echo(f"not enough: {check.rule.title}\n  next step: {check.rule.next_step}")
    for problem in plan.problems:
        click.echo(f"not enough: {problem.message}\n  next step: {problem.next_step}")


def check_text(check: Check) -> str:
    """Whether it is enough, with the numbers."""
    unit = _unit_of(check.rule.needed)
    needed, limit = shown_value(check.needed, unit), shown_value(check.limit, unit)
    share = f"{check.needed / check.available:.0%} of {shown_value(check.available, unit)}"
    planned = f", {limit} planned with" if check.limit != check.available else ""
    return f"{'enough' if check.is_enough else 'NOT ENOUGH'}: {needed}, {share}{planned}"


def _unit_of(name: str) -> Unit:
    if name in BY_NAME:
        return BY_NAME[name].unit
    return next(entry.unit for entry in FORMULAS if entry.name == name)


def _print_lacking(plan: Plan) -> None:
    lacking = {name for names in plan.lacking.values() for name in names}
    options = [entry.option for entry in GIVEN if entry.name in lacking]
    if options:
        click.echo()
        click.echo(f"not computed: {len(plan.lacking)} figures that need {', '.join(options)}")


def _option(name: str) -> str:
    """As it is given; what is not, is told among the problems."""
    return "" if name in DERIVED else BY_NAME[name].option


# ---- JSON, YAML --------------------------------------------------------------------------------------------------


def _object(shown: Shown) -> dict[str, object]:
    plan = shown.plan
    return {
        "is_enough": plan.is_enough,
        "given": [{**_quantity(e, plan), "option": e.option, "origin": shown.origin(e)} for e in _stated(plan)],
        "figures": [
            {**_quantity(e, plan), "section": section, "formula": e.text, "constants": e.constants, "source": e.source}
            for section, formulas in SECTIONS.items()
            for e in formulas
            if e.name in plan.values and e not in _stated_formulas(plan)
        ],
        "checks": [_check_object(check) for check in plan.checks],
        "problems": [{"message": p.message, "next_step": p.next_step} for p in plan.problems],
        "not_computed": {name: [_option(lack) for lack in lacks] for name, lacks in plan.lacking.items()},
        "model": None if shown.model is None else to_object(shown.model),
        "notes": list(shown.notes),
    }


def _quantity(entry: Given | Formula, plan: Plan) -> dict[str, object]:
    """A value of null has no bound."""
    value = plan.values[entry.name]
    return {
        "name": entry.name,
        "title": entry.title,
        "value": None if math.isinf(value) else value,
        "unit": entry.unit.value,
    }


def _check_object(check: Check) -> dict[str, object]:
    return {
        "what": check.rule.title,
        "is_enough": check.is_enough,
        "needed": check.needed,
        "limit": check.limit,
        "available": check.available,
        "next_step": "" if check.is_enough else check.rule.next_step,
    }
