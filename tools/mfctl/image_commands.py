"""``mfctl image``: service bundles, from building to checking them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from meshfusion.tools.mfctl.output import format_option

_PATH = click.Path(path_type=Path, readable=False)
_ARCHITECTURE = click.Choice(("arm64", "amd64"))


def _architecture_option(command: Any) -> Any:
    return click.option(
        "--arch", type=_ARCHITECTURE, default="arm64", show_default=True,
        help="arm64 for DPUs; amd64 for servers, without bf.cfg.",
    )(command)  # fmt: skip


def _source_options(command: Any) -> Any:
    for option in (
        click.option(
            "--cache", type=_PATH, metavar="FOLDER", show_default=".cache/image of the checkout",
            help="Where packages are kept.",
        ),
        click.option(
            "--apt-sources", type=_PATH, metavar="FILE", show_default="the machine's",
            help="Sources of Debian packages, in apt's format.",
        ),
        click.option(
            "--source", type=_PATH, metavar="FOLDER", show_default="the one mfctl runs from",
            help="Checkout of the repository.",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


@click.group()
def image() -> None:
    """Build, sign and check service bundles for DPUs and servers."""


@image.command()
@click.argument("output", type=_PATH, metavar="FOLDER")
@click.option("--config", "config_path", type=_PATH, required=True, metavar="FILE", help="The service's configuration.")
@_architecture_option
@click.option(
    "--target", type=click.Choice(("nvmet", "spdk")), default="nvmet", show_default=True,
    help="What exports the pool: the kernel, or SPDK, which you bring along.",
)  # fmt: skip
@click.option(
    "--spdk-deb", "spdk_debs", type=_PATH, multiple=True, metavar="FILE",
    help="With --target spdk: a Debian package with nvmf_tgt, and others that it needs.",
)  # fmt: skip
@click.option(
    "--spdk-base", type=_PATH, metavar="FOLDER",
    help="With --target spdk, instead: an OCI image layout with nvmf_tgt; it runs as a container of its own.",
)  # fmt: skip
@click.option("--commit", default="HEAD", show_default=True, metavar="REVISION", help="What to build.")
@click.option(
    "--version", default="", metavar="TEXT", show_default="the project's, and the commit", help="Its version."
)
@click.option(
    "--lock",
    "lock_path",
    type=_PATH,
    metavar="FILE",
    show_default="the commit's",
    help="Which packages, see image lock.",
)
@click.option(
    "--device", default="/dev/mmcblk0", show_default=True, metavar="PATH",
    help="Drive of the card that it boots from; on an NVMe drive, by its link in /dev/disk/by-id.",
)  # fmt: skip
@click.option(
    "--chip", "chips", multiple=True, default=("BlueField-3",), show_default=True, metavar="NAME",
    help="Cards that it is for.",
)  # fmt: skip
@click.option("--part-number", "part_numbers", multiple=True, metavar="TEXT", help="Only for these.")
@click.option("--psid", "psids", multiple=True, metavar="TEXT", help="Only for these.")
@click.option("--bfb-sha256", "bfb_sha256", multiple=True, metavar="HEX", help="Only with these BFBs.")
@click.option("--nic-firmware", metavar="VERSION", help="What the card's NIC is to run in the end.")
@click.option(
    "--password-hash-file", type=_PATH, metavar="FILE",
    help="Password of the card's user ubuntu, as openssl passwd -6 prints it.",
)  # fmt: skip
@click.option("--ssh-key", type=_PATH, metavar="FILE", help="Public keys of those who may log in as root.")
@_source_options
@format_option
def build(output: Path, output_format: str, **options: Any) -> None:
    """Make a service bundle in FOLDER, which must not exist.

    Two builds of one commit from the same files are the same, byte by byte. Interrupted, it leaves nothing behind.
    Changes that are in no commit are not built.
    """
    from meshfusion.tools.mfctl.image_build import build_image

    build_image(output, options, output_format)


@image.command()
@_architecture_option
@click.option(
    "--spdk-root", "spdk_roots", multiple=True, metavar="NAME", help="Another Debian package that your SPDK needs."
)
@click.option("--output", type=_PATH, metavar="FILE", show_default="the checkout's", help="Where to write it.")
@_source_options
@format_option
def lock(arch: str, output: Path | None, output_format: str, **options: Any) -> None:
    """Choose the packages of images anew: the newest of the distribution, and wheels as pyproject.toml allows.

    Packages are resolved by apt and pip of this machine, from where they are set up to look. To be committed.
    """
    from meshfusion.tools.mfctl.image_lock import make_image_lock

    make_image_lock(arch, output, options, output_format)


@image.command()
@click.argument("bundle", type=_PATH, metavar="FOLDER")
@click.option("--packages", is_flag=True, help="List every package, too.")
@format_option
def inspect(bundle: Path, packages: bool, output_format: str) -> None:
    """Show what the bundle in FOLDER says of itself. Nothing is checked: see verify."""
    from meshfusion.tools.mfctl.image_show import show_bundle

    show_bundle(bundle, output_format, with_packages=packages)


@image.command()
@click.argument("bundle", type=_PATH, metavar="FOLDER")
@click.option("--key", type=_PATH, required=True, metavar="FILE", help="Public key (PEM) that it must be signed with.")
@format_option
def verify(bundle: Path, key: Path, output_format: str) -> None:
    """Check the signature of the bundle in FOLDER, each file of it, and its images. Exits 1 where anything is wrong."""
    from meshfusion.tools.mfctl.image_show import verify_bundle

    verify_bundle(bundle, key, output_format)


@image.command()
@click.argument("bundle", type=_PATH, metavar="FOLDER")
@click.option("--key", type=_PATH, required=True, metavar="FILE", help="Ed25519 private key (PEM), mode 0600.")
@click.option("--new-key", is_flag=True, help="Make that key first, and FILE.pub, the public one.")
@format_option
def sign(bundle: Path, key: Path, new_key: bool, output_format: str) -> None:
    """Sign the bundle in FOLDER, once all its files are as its manifest says."""
    from meshfusion.tools.mfctl.image_show import sign_with

    sign_with(bundle, key, output_format, is_new=new_key)
