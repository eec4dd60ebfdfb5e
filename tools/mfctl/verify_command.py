"""``mfctl verify``."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshfusion.jbof.errors import ConfigError
from meshfusion.tools.mfctl.exit_codes import EXIT_FAILURE
from meshfusion.tools.mfctl.output import format_option, print_document, print_fields, print_table, to_json

if TYPE_CHECKING:
    from meshfusion.tools.verify.run import Report

_OURS = ("model", "kv_transfer_config", "skip_tokenizer_init", "disable_log_stats")
_KEPT = {"load_always": True, "lookup_deadline_ms": 5000}
"""What is worth loading and how long a lookup may take are no part of what is tested: every hit shall be seen."""


@click.command()
@click.option(
    "--model", required=True, type=click.Path(path_type=Path, exists=True, file_okay=False), metavar="FOLDER",
    help="The model's folder.",
)  # fmt: skip
@click.option(
    "--connector", type=click.Path(path_type=Path, readable=False), metavar="FILE",
    help="vLLM's --kv-transfer-config, or its extra config alone: the pool or service to try. Without it: a pool in a "
    "temporary folder.",
)  # fmt: skip
@click.option(
    "--pool-size",
    default="4GiB",
    show_default=True,
    metavar="SIZE",
    help="Without --connector: size bound of the pool's file.",
)
@click.option(
    "--max-model-len", default=4096, show_default=True, type=click.IntRange(2), metavar="N",
    help="The engine's option; prompts that do not fit are left out.",
)  # fmt: skip
@click.option(
    "--engine-option", "engine_options", multiple=True, metavar="KEY=VALUE",
    help="An argument of vllm.LLM, its value as JSON or text; may be given several times. Use what you serve with.",
)  # fmt: skip
@click.option(
    "--seed", type=int, metavar="N", help="Of the prompts, to repeat a run; without it they are new in every run."
)
@click.option(
    "--keep-pool", is_flag=True,
    help="Keep the temporary pool when verify fails, beside the logs and the report.",
)  # fmt: skip
@format_option
def verify(
    model: Path, connector: Path | None, pool_size: str, max_model_len: int, engine_options: tuple[str, ...],
    seed: int | None, keep_pool: bool, output_format: str,
) -> None:  # fmt: skip
    """Accept an installation: one engine computes prompts and saves them, a fresh one loads them; all is compared.

    Tokens must be equal to those of an answer of the first engine, and the KV blocks that were loaded must hold the
    bytes that were computed. Log-probabilities may differ by four times what the first engine's own answers differ by,
    and by at least 8 rounding steps of the model's dtype. Exits 1 on any difference, and when nothing was loaded. The
    prompts are of random tokens, on both sides of block and chunk boundaries and with shared prefixes; in a pool that
    is kept they stay, as other chunks do. Takes two starts of the engine, of one rank, on this machine's devices.
    """
    from meshfusion.tools.quickstart_inputs import check_model_dir, check_pool_size
    from meshfusion.tools.verify.run import Plan, compute, load, report_of

    options = {"max_model_len": max_model_len, **parse_engine_options(engine_options), "model": str(model.absolute())}
    check_model_dir(model)
    _check_one_rank(options)
    if connector is None:
        check_pool_size(pool_size)
    extra = _read_connector(connector) if connector is not None else None
    with _work_folder(keeps_pool=keep_pool) as work:
        if extra is None:
            extra = {"pool": {"path": str(work.pool), "size": pool_size}}
        plan = Plan(engine_arguments(options, extra), work.path, _new_seed() if seed is None else seed)
        _note("first engine: computes and saves")
        computed = compute(plan, _note)
        _note("second engine: loads")
        report = report_of(plan, computed, load(plan, computed.prompts, _note))
        work.file(report)
    if output_format != "table":
        print_document(report, output_format)
    else:
        print_report(report)
    if not report.is_passed:
        sys.exit(EXIT_FAILURE)


@dataclass
class _Work:
    path: Path
    is_evidence: bool = True

    @property
    def pool(self) -> Path:
        return self.path / "pool"

    def file(self, report: Report) -> None:
        self.is_evidence = not report.is_passed
        if self.is_evidence:
            (self.path / "report.json").write_text(to_json(report), encoding="utf-8")


@contextmanager
def _work_folder(*, keeps_pool: bool) -> Iterator[_Work]:
    """For the engines' logs and the pool. Of what fails logs and report are kept: a pool may have gigabytes."""
    work = _Work(Path(tempfile.mkdtemp(prefix="mfctl-verify-")))
    try:
        yield work
    finally:
        if work.is_evidence:
            if not keeps_pool:
                shutil.rmtree(work.pool, ignore_errors=True)
            _note(f"kept for a report: {work.path}")
        else:
            shutil.rmtree(work.path, ignore_errors=True)


def engine_arguments(options: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Of ``vllm.LLM``, with this connector. ``extra``: its own configuration."""
    return {
        **options,
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
        "kv_transfer_config": {
            "kv_connector": "MeshFusionConnector",
            "kv_connector_module_path": "meshfusion.host.connector.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {**extra, **_KEPT},
        },
    }


def parse_engine_options(given: Sequence[str]) -> dict[str, Any]:
    """Raises UsageError for what is no KEY=VALUE, and for keys that are verify's own."""
    options: dict[str, Any] = {}
    for text in given:
        key, equals, value = text.partition("=")
        key = key.strip().lstrip("-").replace("-", "_")
        if not key.isidentifier() or not equals:
            raise click.UsageError(f"--engine-option {text!r} is not KEY=VALUE, such as dtype=bfloat16.")
        if key in _OURS:
            raise click.UsageError(f"--engine-option {key} is set by verify itself.")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options


def _check_one_rank(options: Mapping[str, Any]) -> None:
    """Blocks are read in the process of the engine's core, where those of several ranks are not."""
    ranks = options.get("tensor_parallel_size", 1)
    if ranks != 1:
        raise ConfigError(
            f"tensor_parallel_size={ranks}: the KV blocks of several ranks cannot be compared yet",
            next_step="verify with one rank, of a smaller model where this one needs several",
        )


def _read_connector(file: Path) -> dict[str, Any]:
    """The connector's own configuration. Raises ConfigError that tells every problem."""
    from meshfusion.dpu.config import read_config_file
    from meshfusion.host.connector.config import EXTRA_CONFIG, OnUnsupported
    from meshfusion.tools.mfctl.connector_config import check_connector_config

    document = read_config_file(file)
    check_connector_config(document, str(file))
    data = document.data
    extra: dict[str, Any] = data.get(EXTRA_CONFIG, data)
    if extra.get("on_unsupported") == OnUnsupported.SERVE_WITHOUT_CACHE.value:
        raise ConfigError(
            f"{file}: with on_unsupported: serve_without_cache an engine may run without the connector",
            next_step="remove on_unsupported: the engine then says why it cannot be served",
        )
    return extra


def _new_seed() -> int:
    return int.from_bytes(os.urandom(4), "little")


def _note(text: str) -> None:
    click.echo(f"... {text}", err=True)


def print_report(report: Report) -> None:
    print_fields(
        [
            ("result", "passed" if report.is_passed else "FAILED"),
            ("model", f"{report.model} ({report.dtype})"),
            ("identity", report.identity),
            ("versions", ", ".join(f"{name} {number}" for name, number in report.versions.items())),
            ("device", f"{report.device} ({report.platform})"),
            ("path", report.path or "-"),
            ("chunks of", f"{report.chunk_tokens} tokens"),
            ("the engine's own answers", f"log-probabilities differ by up to {report.run_to_run_variation:.3g}"),
            ("tolerance", f"{report.tolerance:.3g}"),
            ("prompts' seed", report.seed),
        ]
    )
    click.echo()
    print_table(
        ["GROUP", "CLASS", "LAYERS", "BLOCK", "NEEDED TO RESUME", "BLOCK BYTES", "LOADED", "COMPARED", "DIFFERENT"],
        [
            (
                *(number, group["spec"], group["layers"], f"{group['block_tokens']} tokens", group["needs"]),
                *(group["block_bytes"], found.loaded_blocks, found.compared_blocks, found.differing_blocks),
            )
            for number, (group, found) in enumerate(zip(report.groups, report.group_results, strict=True))
        ],
    )
    click.echo()
    print_table(
        [
            *("PROMPT", "TOKENS", "LOADED", "BLOCKS", "COMPARED", "DIFFERENT", "SAME TOKENS", "OWN DIFF."),
            *("DIFFERENCE", "TTFT COLD", "TTFT LOADED"),
        ],
        [
            (
                *(found.name, found.prompt_tokens, found.loaded_tokens, found.loaded_blocks, found.compared_blocks),
                *(found.differing_blocks, "yes" if found.are_tokens_equal else "NO"),
                *(f"{found.own_difference:.3g}", f"{found.difference:.3g}"),
                *(f"{found.cold_ttft_s * 1e3:.0f} ms", f"{found.loaded_ttft_s * 1e3:.0f} ms"),
            )
            for found in report.prompts
        ],
    )
    click.echo()
    names = sorted(report.saver_counts.keys() | report.loader_counts.keys())
    print_table(
        ["COUNT", "FIRST ENGINE", "SECOND ENGINE"],
        [(name, report.saver_counts.get(name, 0), report.loader_counts.get(name, 0)) for name in names],
    )
    if report.problems or report.notices:
        click.echo()
    for notice in report.notices:
        click.echo(f"notice: {notice}")
    for problem in report.problems:
        click.echo(f"problem: {problem}")
