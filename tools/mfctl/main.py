"""``mfctl`` and the ``meshfusion`` daemon: the command tree, and how its errors end.

Commands import what they need inside themselves, so that ``mfctl --help`` does not wait for an engine's libraries.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import click

from meshfusion.jbof.errors import MeshFusionError
from meshfusion.tools.lab.cli import lab
from meshfusion.tools.mfctl.audit_commands import audit
from meshfusion.tools.mfctl.chunk_commands import chunk
from meshfusion.tools.mfctl.config_commands import config
from meshfusion.tools.mfctl.connector_commands import connector
from meshfusion.tools.mfctl.context_commands import context as context_group
from meshfusion.tools.mfctl.doctor_command import doctor
from meshfusion.tools.mfctl.dpu_commands import dpu
from meshfusion.tools.mfctl.events_command import events
from meshfusion.tools.mfctl.exit_codes import EXIT_INTERRUPTED, exit_codes_help
from meshfusion.tools.mfctl.exports_commands import exports
from meshfusion.tools.mfctl.image_commands import image
from meshfusion.tools.mfctl.jbof_commands import jbof
from meshfusion.tools.mfctl.k8s_commands import k8s
from meshfusion.tools.mfctl.kinds_command import kinds
from meshfusion.tools.mfctl.output import report_error, report_object, wanted_format
from meshfusion.tools.mfctl.own_version import own_version
from meshfusion.tools.mfctl.path_commands import path
from meshfusion.tools.mfctl.plan_command import plan
from meshfusion.tools.mfctl.pool_commands import pool
from meshfusion.tools.mfctl.progress import InterruptedWork
from meshfusion.tools.mfctl.service_access import access_options, remember_access
from meshfusion.tools.mfctl.service_commands import run, service
from meshfusion.tools.mfctl.shell_commands import completion, man
from meshfusion.tools.mfctl.sim_command import sim
from meshfusion.tools.mfctl.support_commands import support
from meshfusion.tools.mfctl.token_commands import token
from meshfusion.tools.mfctl.top_command import top
from meshfusion.tools.mfctl.trace_command import trace
from meshfusion.tools.mfctl.verify_command import verify


class RootGroup(click.Group):
    """The outermost command: every error the user can meet ends as one message and an exit code."""

    def main(self, *args: Any, **extra: Any) -> Any:
        end_with_exit_code(super().main, *args, **extra)


class RootCommand(click.Command):
    """As :class:`RootGroup`, for a program of one command."""

    def main(self, *args: Any, **extra: Any) -> Any:
        end_with_exit_code(super().main, *args, **extra)


def end_with_exit_code(
    run_command: Callable[..., Any], args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
) -> NoReturn:
    """Run a click command; report what it raises in the format that was asked for, and exit."""
    # gRPC's library would print its own account of a failure beside ours.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    arguments = sys.argv[1:] if args is None else list(args)
    output_format = wanted_format(arguments)
    extra["standalone_mode"] = False
    code: object = 0
    try:
        code = run_command(arguments, prog_name, **extra)
    except MeshFusionError as e:
        code = report_error(e, output_format)
    except click.ClickException as e:
        if output_format != "table":
            report_object(type(e).__name__, e.format_message(), "See the command's --help.", e.exit_code, output_format)
        else:
            e.show()
        code = e.exit_code
    except (click.Abort, KeyboardInterrupt) as e:
        code = _report_interruption(e, output_format)
    except OSError as e:
        if e.filename is None:
            raise  # not about a file the user named: a defect, wants its traceback
        report = MeshFusionError(f"{e.filename}: {e.strerror}", next_step="Check the path, permissions and space.")
        code = report_error(report, output_format)
    sys.exit(code if isinstance(code, int) else 0)


def _report_interruption(error: BaseException, output_format: str) -> int:
    """click makes an Abort of an interruption, and keeps it as the cause."""
    told = error if isinstance(error, InterruptedWork) else error.__cause__ or error.__context__
    if isinstance(told, InterruptedWork):
        message, next_step = told.message, told.next_step
    else:
        message, next_step = "interrupted", "Run the same command again."
    if output_format != "table":
        report_object("Interrupted", message, next_step, EXIT_INTERRUPTED, output_format)
    elif isinstance(told, InterruptedWork):
        click.echo(f"{message}\n  next step: {next_step}", err=True)
    else:
        click.echo(message, err=True)
    return EXIT_INTERRUPTED


@click.group(cls=RootGroup, epilog=exit_codes_help(), context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(own_version(), prog_name="mfctl")
@access_options
@click.pass_context
def mfctl(context: click.Context, /, **access: Any) -> None:
    """Create, serve and inspect MeshFusion pools, their drives and paths to them; try RDMA without RDMA hardware."""
    remember_access(context, access)


COMMANDS = (
    *(pool, service, chunk, jbof, exports, path, events, trace, top, config, kinds, doctor, support, verify, sim, lab),
    *(dpu, image, token, audit, plan, connector, k8s, context_group, completion, man),
)
for command in COMMANDS:
    mfctl.add_command(command)

meshfusion = RootCommand(
    "meshfusion",
    callback=run.callback,
    params=run.params,
    help=run.help,
    epilog=exit_codes_help(),
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Entry point of ``mfctl``."""
    mfctl.main(prog_name="mfctl")


def service_main() -> None:
    """Entry point of ``meshfusion``: the same as ``mfctl service run``."""
    meshfusion.main(prog_name="meshfusion")


if __name__ == "__main__":
    main()
