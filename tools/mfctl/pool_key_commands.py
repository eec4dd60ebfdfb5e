"""``mfctl pool erase-key`` and ``mfctl pool rekey``: the keys of encrypted pools."""

from __future__ import annotations

import time
from pathlib import Path

import click

from meshfusion.jbof.errors import ConfigError
from meshfusion.tools.mfctl.consent import agree, destructive
from meshfusion.tools.mfctl.output import format_option, print_document

PATH = click.Path(path_type=Path, readable=False)


@click.command("erase-key")
@click.argument("path", type=PATH, required=False)
@click.option(
    "--config", "config_path", type=PATH, metavar="FILE", help="Instead of PATH: the service's configuration."
)
@click.option(
    "--pool", "pool_name", default="", metavar="NAME", help="With --config: which pool, where it has several."
)
@destructive
@format_option
def erase_key(path: Path | None, config_path: Path | None, pool_name: str, yes: bool, output_format: str) -> None:
    """Destroy the keys of the encrypted pool in PATH, and with them all that it holds: the end of a tenant.

    The headers of its drives are erased, overwritten and removed. Nobody may use the pool meanwhile, and it never opens
    again. Copies of the headers open it still with the key file: destroy these, or the key file, likewise.
    """
    from meshfusion.dpu.encryption.erasing import erase_key as erase
    from meshfusion.dpu.encryption.erasing import note_to_erase
    from meshfusion.dpu.pool_dir import PoolLayout
    from meshfusion.jbof.drives.system.luks import CRYPTSETUP

    layout = PoolLayout(_path(path, config_path, pool_name).absolute())
    note = note_to_erase(layout)
    devices = ", ".join(str(one.device) for one in note.slices)
    agree(f"All that the pool {layout.directory} holds on {devices} is lost for good.", yes=yes)
    erased = erase(layout, CRYPTSETUP, int(time.time()))
    if output_format != "table":
        print_document(erased, output_format)
        return
    click.echo(f"erased the key of {layout.directory}: what {devices} held cannot be read any more")
    for device in erased.blank:
        click.echo(f"{device} is blank: another pool can have it")
    for device in erased.unproven:
        click.echo(
            f"{device} was not touched: it was away, or not seen to be the pool's; another pool takes it with --force"
        )
    click.echo(f"destroy copies of the headers, and the key file where it has no other use: shred -u {erased.key_file}")


@click.command()
@click.argument("path", type=PATH)
@click.option(
    "--new-key-file", type=PATH, required=True, metavar="FILE", help="With the new key, of mode 0600 and random."
)
@click.option(
    "--old-key-file", type=PATH, metavar="FILE", help="With the key so far; default: where the pool's was seen last."
)
@format_option
def rekey(path: Path, new_key_file: Path, old_key_file: Path | None, output_format: str) -> None:
    """Give the encrypted pool in PATH another key, while it is served or not. Nothing that it holds is written anew.

    The key so far opens it no more, but copies of its headers that were made before. Interrupted, do it again. Then
    name the new file in the service's configuration, pool.encryption.key_file.
    """
    from meshfusion.dpu.encryption.rekeying import rekey as change
    from meshfusion.dpu.pool_dir import PoolLayout
    from meshfusion.jbof.drives.system.luks import CRYPTSETUP

    count = change(PoolLayout(path.absolute()), new_key_file, CRYPTSETUP, old_key_file=old_key_file)
    if output_format != "table":
        print_document({"headers": count, "key_file": str(new_key_file.absolute())}, output_format)
        return
    click.echo(f"{count} {'header is' if count == 1 else 'headers are'} opened by {new_key_file.absolute()} only")
    click.echo("name it in the service's configuration, pool.encryption.key_file, before the service starts again")


def _path(path: Path | None, config_path: Path | None, pool_name: str) -> Path:
    if (path is None) == (config_path is None) or (pool_name and config_path is None):
        raise click.UsageError("Name either the PATH of a pool, or --config FILE and there --pool NAME.")
    if path is not None:
        return path
    from meshfusion.tools.mfctl.config_model import config_alone

    assert config_path is not None
    served = {one.name: one for one in config_alone(config_path).served}
    if pool_name not in served:
        names = ", ".join(filter(None, served)) or "none has a name"
        raise ConfigError(f"{config_path} has no pool {pool_name!r}: {names}", next_step="name one of them with --pool")
    return served[pool_name].pool.path
