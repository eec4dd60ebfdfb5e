"""``mfctl kinds``: the table, a wheel's news, a model's groups."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from meshfusion.tools.mfctl.exit_codes import EXIT_FAILURE
from meshfusion.tools.mfctl.numbers import FiniteRange
from meshfusion.tools.mfctl.output import format_bytes, format_option, print_document, print_fields, print_table

if TYPE_CHECKING:
    from meshfusion.host.kv.kinds import KvKind
    from meshfusion.tools.known_surface import WheelReport
    from meshfusion.tools.model_kv import LayerKv, ModelKv
    from meshfusion.tools.offload_estimate import Machine

_NOT_YET_PROVEN: Final = (
    "the engine may still be refused at its start, on CPUs MLA is: `mfctl verify --model FOLDER` tries it"
)
"""What the identity needs of attention layers (:mod:`meshfusion.host.kv.identity`) they have only in a whole engine."""


@click.command()
@click.option(
    "--wheel",
    type=click.Path(path_type=Path),  # what is wrong with it is told with a next step
    metavar="FILE",
    help="Instead: what the vLLM in this wheel has that is not known yet. Nothing of it is installed or run.",
)
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Instead: the KV groups of this model, of which kinds they are, which are served, and whether that pays.",
)
@click.option(
    "--link-rate",
    "link_gb_per_s",
    type=FiniteRange(0.001),
    default=25.0,
    show_default=True,
    metavar="GB/S",
    help="With --model: assumed rate of loads.",
)
@click.option(
    "--device-rate",
    "device_tflop_per_s",
    type=FiniteRange(0.001),
    default=400.0,
    show_default=True,
    metavar="TFLOP/S",
    help="With --model: assumed rate at which the device computes a prompt.",
)
@format_option
def kinds(
    wheel: Path | None, model: Path | None, link_gb_per_s: float, device_tflop_per_s: float, output_format: str
) -> None:  # fmt: skip
    """Show the kinds of KV: what each is, whether requests can share it, and what must be there to resume.

    With --wheel, exits 1 when the wheel has anything that is not known. With --model, the engine's own code builds the
    model without its weights, which takes up to a minute; it exits 0 also where nothing is served (in JSON,
    are_kinds_served is false then). Blocks and pages are those of the engine's defaults.
    """
    if wheel is not None and model is not None:
        raise click.UsageError("--wheel and --model exclude each other.")
    if wheel is not None:
        _show_wheel(wheel, output_format)
    elif model is not None:
        from meshfusion.tools.offload_estimate import Machine

        _show_model(model, Machine(link_gb_per_s * 1e9, device_tflop_per_s * 1e12), output_format)
    else:
        _show_table(output_format)


def _show_table(output_format: str) -> None:
    from meshfusion.host.kv.kinds import KINDS

    if output_format != "table":
        print_document({"kinds": [_kind_object(kind) for kind in KINDS]}, output_format)
        return
    print_table(["KIND", "SHARED", "SERVED", "NEEDED TO RESUME", "WHAT IT IS"], [_kind_row(kind) for kind in KINDS])
    for kind in KINDS:
        click.echo()
        print_fields(
            [
                (kind.name, ", ".join(name.rpartition(".")[2] for name in kind.classes)),
                ("  why", kind.why),
                *([("  not served", kind.unserved)] if kind.unserved else []),
                ("  one page", kind.granularity),
                ("  its bytes", kind.page_bytes),
                ("  ranks", kind.replication),
                ("  source", kind.source),
            ]
        )


def _kind_row(kind: KvKind) -> tuple[str, ...]:
    return (kind.name, _yes(kind.is_reusable), _yes(kind.is_served), kind.need.value, kind.what)


def _kind_object(kind: KvKind) -> dict[str, object]:
    return {
        "name": kind.name, "what": kind.what, "is_reusable": kind.is_reusable, "is_served": kind.is_served,
        "why": kind.why, "unserved": kind.unserved, "needed_to_resume": kind.need.value,
        "granularity": kind.granularity, "replication": kind.replication, "page_bytes": kind.page_bytes,
        "source": kind.source, "classes": kind.classes,
    }  # fmt: skip


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _show_wheel(wheel: Path, output_format: str) -> None:
    from meshfusion.tools.known_surface import examine_wheel

    report = examine_wheel(wheel)
    if output_format != "table":
        print_document({**_wheel_object(report), "differences": report.differences}, output_format)
    else:
        print_fields([("version", report.version), ("compared with", report.compared_with)])
        click.echo()
        print_table(["SPEC CLASS", "KIND"], [(name, kind or "NOT KNOWN") for name, kind in report.spec_classes.items()])
        if report.differences:
            click.echo()
            print_table(
                ["CHANGE", "WHAT", "NAME", "WAS", "NOW"],
                [(d.change, d.section, d.name, d.was or "-", d.now or "-") for d in report.differences],
            )
        click.echo()
        click.echo(_wheel_summary(report))
    if not report.is_known:
        sys.exit(EXIT_FAILURE)


def _wheel_object(report: WheelReport) -> dict[str, object]:
    return {
        "version": report.version, "compared_with": report.compared_with, "is_known": report.is_known,
        "spec_classes": report.spec_classes, "unclassified": report.unclassified,
    }  # fmt: skip


def _wheel_summary(report: WheelReport) -> str:
    if report.is_known:
        return "nothing that is not known"
    return (
        f"{len(report.unclassified)} spec classes have no kind, {len(report.differences)} entries differ from "
        f"{report.compared_with}: judge each, and see host/kv/kinds.py and host/kv/versions.py"
    )


def _show_model(model: Path, machine: Machine, output_format: str) -> None:
    from meshfusion.tools.model_kv import describe_model, to_object
    from meshfusion.tools.offload_estimate import samples, verdict

    click.echo("building the model's skeleton with the engine's own code, up to a minute ...", err=True)
    found = describe_model(model)
    pays, why = verdict(found, machine)
    if output_format != "table":
        print_document(
            {
                "model": to_object(found), "are_kinds_served": not found.all_refusals,
                "bytes_per_token": _bytes_per_token(found), "machine": machine, "pays": pays, "why": why,
                "times": samples(found, machine),
            },
            output_format,
        )  # fmt: skip
        return
    print_fields(_model_fields(found, machine))
    click.echo()
    print_table(
        ["GROUP", "KIND", "CLASS", "LAYERS", "BLOCK", "NEEDED TO RESUME", "BYTES", "WRITTEN/HELD", "KIND SERVED"],
        [
            _layer_row(index, member, is_served=not (group.refusals or found.refusals))
            for index, group in enumerate(found.groups)
            for member in group.members
        ],
    )
    click.echo()
    if found.all_refusals:
        for line in found.refusals:
            click.echo(f"not served: {line}")
        for index, group in enumerate(found.groups):
            for line in group.refusals:
                click.echo(f"group {index} not served: {line}")
    else:
        click.echo(_NOT_YET_PROVEN)
        click.echo()
        print_table(
            ["PREFIX", "LOADED", "LOADING", "COMPUTING"],
            [
                (f"{t.tokens} tokens", format_bytes(t.load_bytes), f"{t.load_s * 1e3:.2f} ms",
                 f"{t.recompute_s * 1e3:.2f} ms")
                for t in samples(found, machine)
            ],
        )  # fmt: skip
    click.echo()
    click.echo(f"does offloading pay: {_yes(pays)}; {why}")


def _model_fields(model: ModelKv, machine: Machine) -> list[tuple[str, object]]:
    states = sum(member.bytes_per_state for group in model.groups for member in group.members)
    return [
        ("engine", f"vLLM {model.engine} for {model.platform}, described in {model.elapsed_s:.0f} s"),
        (
            "parameters",
            f"{model.parameters / 1e6:.1f} million, of which {model.active_parameters / 1e6:.1f} for a token",
        ),
        ("KV of a token", format_bytes(round(_bytes_per_token(model)))),
        *([("one snapshot", format_bytes(states))] if states else []),
        (
            "assumed",
            f"loads at {machine.link_bytes_per_s / 1e9:g} GB/s; the device does "
            f"{machine.device_operations_per_s / 1e12:g} TFLOP/s, two operations for each parameter and token",
        ),
    ]


def _bytes_per_token(model: ModelKv) -> float:
    return sum(member.bytes_per_token for group in model.groups for member in group.members)


def _layer_row(index: int, member: LayerKv, *, is_served: bool) -> tuple[object, ...]:
    amount = f"{member.bytes_per_state} per state" if member.is_state else f"{member.bytes_per_token:g} per token"
    return (
        *(index, member.kind or "NOT KNOWN", member.spec_class, f"{member.layers} from {member.first_layer}"),
        *(f"{member.block_tokens} tokens", member.rule or "-", amount, f"{member.real_bytes}/{member.held_bytes}"),
        _yes(is_served),
    )
