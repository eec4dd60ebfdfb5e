"""``mfctl image build``, from its options to the bundle."""

from __future__ import annotations

import hashlib
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import click

from meshfusion.dpu.image.bundle import CARD_ARCHITECTURE, Devices
from meshfusion.tools.image.architecture import ARCHITECTURES
from meshfusion.tools.image.bf_cfg_text import CardSettings
from meshfusion.tools.image.build import build_bundle
from meshfusion.tools.image.errors import BuildError
from meshfusion.tools.image.lock import REMAKE, Lock, Target, read_lock
from meshfusion.tools.image.plan import Card, Plan
from meshfusion.tools.image.requirements import check_requirements
from meshfusion.tools.image.service_needs import service_needs
from meshfusion.tools.image.source import LOCKS, Source, is_changed, read_source
from meshfusion.tools.image.spdk import SpdkImage, SpdkPackages, spdk_image, spdk_packages
from meshfusion.tools.image.staging import staged_folder
from meshfusion.tools.image.store import PackageStore
from meshfusion.tools.mfctl.image_places import cache_folder, checkout
from meshfusion.tools.mfctl.image_show import show_bundle
from meshfusion.tools.mfctl.progress import Progress

_NOT_MADE: Final = "no bundle was made"
_VERSION: Final = re.compile(r"[0-9][A-Za-z0-9.+!-]{0,99}")


def build_image(output: Path, options: dict[str, Any], output_format: str) -> None:
    _check_options(options)
    root = checkout(options["source"])
    with staged_folder(output) as folder:
        plan = _plan(root, options)
        if is_changed(root):
            click.echo(f"note: {root} has changes that are in no commit; they are not built", err=True)
        with ExitStack() as stack:
            build_bundle(plan, folder, _Bars(stack).told)
    show_bundle(output, output_format)


class _Bars:
    """One for each thing that is done, the former gone."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._what = ""
        self._bar = Progress("", left=_NOT_MADE)

    def told(self, what: str, done_bytes: int, total_bytes: int) -> None:
        if what != self._what:
            self._stack.close()
            self._what = what
            self._bar = self._stack.enter_context(Progress(what, left=_NOT_MADE))
        if total_bytes:
            self._bar.update(done_bytes, total_bytes)


def _check_options(options: dict[str, Any]) -> None:
    named = bool(options["spdk_debs"]) + (options["spdk_base"] is not None)
    if options["target"] == "nvmet" and named:
        raise click.UsageError("--spdk-deb and --spdk-base go with --target spdk.")
    if options["target"] == "spdk" and named != 1:
        raise click.UsageError(
            "--target spdk needs SPDK's target, which is in no registry: name --spdk-deb FILE or --spdk-base FOLDER."
        )
    if options["version"] and not _VERSION.fullmatch(options["version"]):
        raise click.UsageError(f"--version {options['version']!r}: write one like 1.2.0 or 1.2.0+site3.")


def _plan(root: Path, options: dict[str, Any]) -> Plan:
    """What is cheap to find wrong comes first."""
    target: Target = options["target"]
    architecture = ARCHITECTURES[options["arch"]]
    needs = service_needs(options["config_path"], target)
    card = _card(options) if architecture.machine == CARD_ARCHITECTURE else None
    source = read_source(root, options["commit"])
    lock, lock_sha256 = _lock(source, options["lock_path"], options["arch"])
    check_requirements(lock, source.project, target)
    debs = lock.debs_for(target)
    spdk: SpdkPackages | SpdkImage | None = None
    if options["spdk_debs"]:
        spdk = spdk_packages(options["spdk_debs"], architecture, {deb.name: deb.version for deb in debs})
    elif options["spdk_base"] is not None:
        spdk = spdk_image(options["spdk_base"], architecture)
    store = PackageStore(cache_folder(options["cache"], root), architecture, options["apt_sources"])
    with Progress("fetching packages", left=_NOT_MADE):
        kept_debs, kept_wheels = store.debs(debs), store.wheels(lock.wheels_for(target))
    return Plan(
        source, options["version"] or source.version, lock, lock_sha256, target,
        tuple(kept_debs), tuple(kept_wheels), needs, card, spdk,
    )  # fmt: skip


def _lock(source: Source, path: Path | None, arch: str) -> tuple[Lock, str]:
    if path is None:
        name, data = f"{LOCKS}/{arch}.json of {source.commit[:12]}", source.lock_data(arch)
        if data is None:
            raise BuildError(f"{name} does not exist", next_step=REMAKE.format(architecture=arch))
    else:
        name, data = str(path), path.read_bytes()
    lock = read_lock(data, name)
    if lock.architecture != arch:
        raise BuildError(f"{name}: is for {lock.architecture}", next_step=f"Name the one for {arch}, or --arch.")
    return lock, hashlib.sha256(data).hexdigest()


def _card(options: dict[str, Any]) -> Card:
    devices = Devices(
        chips=list(options["chips"]), part_numbers=list(options["part_numbers"]), psids=list(options["psids"])
    )
    for digest in options["bfb_sha256"]:
        if not re.fullmatch("[0-9a-f]{64}", digest):
            raise click.UsageError(f"--bfb-sha256 {digest!r}: is no SHA-256 in hex, as sha256sum prints it.")
    hash_file, key_file = options["password_hash_file"], options["ssh_key"]
    keys = () if key_file is None else tuple(line for line in key_file.read_text().splitlines() if line.strip())
    settings = CardSettings(
        options["device"], password_hash="" if hash_file is None else hash_file.read_text().strip(), ssh_keys=keys
    )
    if hash_file is not None and not settings.password_hash:
        raise BuildError(f"--password-hash-file: {hash_file} is empty", next_step="Make one: openssl passwd -6")
    return Card(devices, settings, tuple(options["bfb_sha256"]), options["nic_firmware"])
