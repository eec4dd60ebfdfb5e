"""``mfctl support dump``."""

from __future__ import annotations

import time
from pathlib import Path

import click

from meshfusion.tools.mfctl.context_choice import chosen_services, refuse_beside_context
from meshfusion.tools.mfctl.exit_codes import EXIT_UNREACHABLE
from meshfusion.tools.mfctl.output import format_option, print_document
from meshfusion.tools.mfctl.sources import service_option


@click.group()
def support() -> None:
    """Gather what somebody needs who is asked for help."""


@support.command()
@click.argument("path", type=click.Path(path_type=Path, readable=False), required=False)
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path, readable=False),
    metavar="FILE",
    help="Configuration of the service; the service and the pool are those that it names.",
)
@service_option("The running service is at unix:///path or host:port; without it and --config that of the context.")
@click.option(
    "--log",
    type=click.Path(path_type=Path, readable=False),
    metavar="FILE",
    help="The service's log; its last MiB goes into the bundle as it is.  [default: log.file]",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Where to write it.  [default: meshfusion-support-TIME.tar.gz]",
)
@format_option
def dump(
    path: Path | None,
    config_path: Path | None,
    address: str | None,
    log: Path | None,
    output: Path | None,
    output_format: str,
) -> None:
    """Write an archive with the state of service, pool, drives and machine, readable by you only. PATH: of the pool,
    where it is not the one of the configuration.

    It holds the configuration without its secrets, stacks of the service's threads, and what mfctl doctor says; no
    chunks, no keys, no environment. What could not be had is listed in its manifest, and here. Exits 5 when the service
    does not tell its state: the archive is written all the same.
    """
    from meshfusion.tools.mfctl.own_version import own_version
    from meshfusion.tools.mfctl.service_access import with_access
    from meshfusion.tools.mfctl.support_bundle import Part, collect, write_bundle
    from meshfusion.tools.mfctl.support_parts import SERVICE_STATE, parts_of, subject_of

    now_s = time.time()
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now_s))
    archive = output or Path(f"meshfusion-support-{stamp}.tar.gz")
    subject = subject_of(config_path, _address(config_path, address, path), path, log)
    parts = parts_of(subject)
    # Each is made in a thread of its own.
    collected = collect(Part(part.name, with_access(part.make)) for part in parts)
    facts: dict[str, object] = {"made_at": stamp, "made_by": f"meshfusion {own_version()}"}
    write_bundle(archive, collected, facts=facts, now_s=now_s)
    is_away = subject.address is not None and SERVICE_STATE not in collected.files
    if output_format != "table":
        document = {"path": str(archive), "files": sorted(collected.files), "failed": list(collected.failures)}
        print_document(document, output_format)
    else:
        for failure in collected.failures:
            click.echo(f"left out: {failure.part}: {failure.error}", err=True)
        if subject.address is None:
            click.echo("note: no service is known of: --config FILE or --service ADDRESS names it", err=True)
        elif is_away:
            click.echo(f"the service at {subject.address} does not tell its state: what it knows is missing", err=True)
        click.echo(f"wrote {archive} with {len(collected.files)} files; look through it before you pass it on")
    if is_away:
        raise click.exceptions.Exit(EXIT_UNREACHABLE)


def _address(config_path: Path | None, address: str | None, pool: Path | None) -> str | None:
    """Of --service, or of the context where nothing else tells which service is meant."""
    if address is None and (config_path is not None or pool is not None):
        refuse_beside_context("PATH or --config")
        return None
    services = chosen_services(address)
    return None if services is None else services.only.address
