"""A service bundle, from a plan: its images, and what the machine that runs them needs beside."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from meshfusion.dpu.image.bundle import CARD_ARCHITECTURE, MANIFEST, BfCfgEntry, FileEntry, ImageEntry, Manifest
from meshfusion.dpu.image.bundle_check import LAYOUT
from meshfusion.tools.image.bf_cfg_text import bf_cfg_text
from meshfusion.tools.image.deb_content import deb_control
from meshfusion.tools.image.host_files import host_files
from meshfusion.tools.image.images import spdk_reference, write_images
from meshfusion.tools.image.oci_layout import canonical_json
from meshfusion.tools.image.plan import NAME, Plan, Told
from meshfusion.tools.image.sbom import Component, sbom
from meshfusion.tools.image.service_needs import CONFIG_FILE
from meshfusion.tools.image.spdk import SpdkImage, SpdkPackages
from meshfusion.tools.image.static_pod import static_pod
from meshfusion.tools.image.wheel_content import wheel_metadata

SLOT_FILES: Final = "dpu/image/slots/data/"
"""Of the commit: what a card needs to change slots. Drop-ins of the service's unit end in ``.conf``, all others are
programs."""
_BF_CFG: Final = "bf.cfg"

Placed = dict[str, tuple[str, int]]
"""Text and permissions of files, by path below ``/`` of the machine."""


def build_bundle(plan: Plan, folder: Path, told: Told = lambda *_: None) -> Manifest:
    """Into ``folder``, which is empty. Raises BuildError, ConfigProblemsError and OSError."""
    assert (plan.card is not None) == (plan.architecture.machine == CARD_ARCHITECTURE), "cards are of one architecture"
    spdk_program = plan.spdk.program if isinstance(plan.spdk, SpdkPackages) else None
    units = {path: (text, 0o644) for path, text in host_files(plan.needs, spdk_program).items()}
    slots = _slot_files(plan)
    texts = {
        "service.yaml": plan.needs.text,
        "pod.yaml": static_pod(plan.needs, plan.reference, _target(plan)),
        **{f"units/{path}": text for path, (text, _) in units.items()},
        **{f"slot/{name}": text for name, (_, text, _) in slots.items()},
    }
    if plan.card is not None:
        placed = units | {place: (text, mode) for place, text, mode in slots.values()}
        placed[str(CONFIG_FILE).lstrip("/")] = (plan.needs.text, 0o600)
        texts[_BF_CFG] = bf_cfg_text(plan.title, plan.card.settings, placed)
    images = write_images(plan, folder / LAYOUT, told)
    texts["sbom.json"] = canonical_json(_bill(plan)).decode()
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    manifest = _manifest(plan, folder, images)
    (folder / MANIFEST).write_bytes(canonical_json(manifest.model_dump(exclude_none=True)))
    return manifest


def _slot_files(plan: Plan) -> dict[str, tuple[str, str, int]]:
    """By name: place on the machine, text and permissions."""
    found = {}
    for path, entry in plan.source.files.items():
        name = path.removeprefix(SLOT_FILES)
        if name == path or name.endswith(".py"):
            continue
        is_drop_in = name.endswith(".conf")
        parent = "etc/systemd/system/meshfusion.service.d" if is_drop_in else "usr/lib/meshfusion"
        found[name] = (f"{parent}/{name}", entry.data.decode(), 0o644 if is_drop_in else 0o755)
    return found


def _target(plan: Plan) -> tuple[str, str] | None:
    """Image and program of nvmf_tgt."""
    if plan.spdk is None:
        return None
    return spdk_reference(plan.spdk) if isinstance(plan.spdk, SpdkImage) else plan.reference, plan.spdk.program


def _manifest(plan: Plan, folder: Path, images: list[ImageEntry]) -> Manifest:
    files = list(_file_entries(folder))
    digests = {entry.path: entry.sha256 for entry in files}
    card = plan.card
    return Manifest(
        format=2,
        name=NAME,
        version=plan.version,
        architecture=plan.architecture.machine,
        devices=None if card is None else card.devices,
        bf_cfg=None if card is None else BfCfgEntry(path=_BF_CFG, sha256=digests[_BF_CFG]),
        bfb_sha256=[] if card is None else list(card.bfb_sha256),
        nic_firmware=None if card is None else card.nic_firmware,
        target=plan.target,
        commit=plan.source.commit,
        commit_time_s=plan.source.time_s,
        lock_sha256=plan.lock_sha256,
        spdk=None if plan.spdk is None else plan.spdk.entry,
        images=images,
        files=files,
    )


def _file_entries(folder: Path) -> Iterator[FileEntry]:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
                yield FileEntry(path=path.relative_to(folder).as_posix(), sha256=sha256, size_bytes=file.tell())


def _bill(plan: Plan) -> dict[str, object]:
    debs = [
        Component("deb", package.name, package.version, package.sha256, deb_control(path).architecture)
        for package, path in plan.debs
    ]
    wheels = [
        Component("pypi", package.name, package.version, package.sha256, licence=metadata.licence)
        for package, path in plan.wheels
        for metadata in (wheel_metadata(path, package.name),)
    ]
    own = Component("generic", NAME, plan.version, licence="Apache-2.0")
    given = list(_given(plan))
    seed = "\n".join([plan.title, *(component.purl + component.sha256 for component in (*debs, *wheels, *given))])
    return sbom(NAME, plan.version, plan.created, seed, (own, *debs, *wheels, *given))


def _given(plan: Plan) -> Iterator[Component]:
    """By the operator."""
    if isinstance(plan.spdk, SpdkPackages):
        for control, sha256 in zip(plan.spdk.controls, plan.spdk.sha256s, strict=True):
            yield Component("deb", control.name, control.version, sha256, control.architecture)
    elif plan.spdk is not None:
        entry = plan.spdk.entry
        yield Component("oci", entry.name.rpartition("/")[2].lower(), f"sha256:{entry.sha256}", entry.sha256)
