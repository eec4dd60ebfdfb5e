"""``mfctl image inspect``, ``verify`` and ``sign``: what is read of a bundle, and shown."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import click

from meshfusion.dpu.image.bundle import MANIFEST, Bundle, SignatureState, read_bundle
from meshfusion.dpu.image.bundle_check import bundle_problems, content_problems
from meshfusion.dpu.image.errors import BundleError
from meshfusion.jbof.config_problems import ConfigProblemsError
from meshfusion.tools.mfctl.output import format_bytes, print_document, print_fields, print_table
from meshfusion.tools.mfctl.progress import Progress

_BILL = "sbom.json"


def show_bundle(folder: Path, output_format: str, *, with_packages: bool = False) -> None:
    bundle = read_bundle(folder, None)
    packages = _packages(folder, bundle)
    document = _document(bundle, packages)
    if output_format != "table":
        print_document(document | ({"packages": packages} if with_packages else {}), output_format)
        return
    counts = Counter(package["kind"] for package in packages)
    manifest = bundle.manifest
    devices = manifest.devices
    rows: list[tuple[str, object]] = [
        ("name", manifest.name), ("version", manifest.version), ("architecture", manifest.architecture),
        ("target", manifest.target or ""), ("commit", manifest.commit or ""), ("digest", bundle.digest),
        ("signature", bundle.signature.value), ("size", format_bytes(document["size_bytes"])),
        ("chips", "" if devices is None else ", ".join(devices.chips)),
        ("part numbers", "" if devices is None else ", ".join(devices.part_numbers)),
        ("PSIDs", "" if devices is None else ", ".join(devices.psids)),
        ("SPDK", "" if manifest.spdk is None else f"{manifest.spdk.name} {manifest.spdk.version}".strip()),
        *((f"{image.role} image", f"{image.reference} {image.digest}") for image in manifest.images),
        ("packages", ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))),
    ]  # fmt: skip
    print_fields([row for row in rows if row[1]])
    if with_packages:
        click.echo()
        print_table(("KIND", "PACKAGE", "VERSION"), [(p["kind"], p["name"], p["version"]) for p in packages])


def verify_bundle(folder: Path, key: Path, output_format: str) -> None:
    bundle = _checked(folder, key.read_bytes(), must_be_signed=True)
    if output_format != "table":
        print_document({"digest": bundle.digest, "version": bundle.manifest.version, "is_valid": True}, output_format)
        return
    click.echo(f"{folder}: {bundle.manifest.name} {bundle.manifest.version} is whole, and signed with that key")


def sign_with(folder: Path, key: Path, output_format: str, *, is_new: bool) -> None:
    from meshfusion.dpu.image.signing import new_signing_key, read_signing_key, sign_bundle

    bundle = _checked(folder, None, must_be_signed=False)
    public = new_signing_key(key) if is_new else None
    sign_bundle(folder, (folder / MANIFEST).read_bytes(), read_signing_key(key))
    if output_format != "table":
        document = {"digest": bundle.digest, "public_key": None if public is None else str(public)}
        print_document(document, output_format)
        return
    click.echo(f"signed {bundle.manifest.name} {bundle.manifest.version}, {bundle.digest}")
    if public is not None:
        click.echo(f"check it with --key {public}; keep {key} to yourself, it cannot be made again")


def _checked(folder: Path, public_key: bytes | None, *, must_be_signed: bool) -> Bundle:
    """Raises ConfigProblemsError with all that is wrong."""
    bundle = read_bundle(folder, public_key)
    total_bytes = sum(entry.size_bytes for entry in bundle.manifest.files)
    done_bytes = 0

    def moved(count_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += count_bytes
        progress.update(done_bytes, total_bytes)

    with Progress("checking the bundle", left="nothing was changed") as progress:
        problems = (bundle_problems if must_be_signed else content_problems)(folder, bundle, moved)
    if problems:
        raise ConfigProblemsError(str(folder), tuple(problems), next_step="Do not use it until that is settled.")
    assert not must_be_signed or bundle.signature is SignatureState.VALID, bundle.signature
    return bundle


def _document(bundle: Bundle, packages: list[dict[str, str]]) -> dict[str, Any]:
    manifest = bundle.manifest.model_dump(mode="json", exclude_none=True)
    files = manifest.pop("files", [])
    return {
        **manifest,
        "digest": bundle.digest,
        "signature": bundle.signature.value,
        "size_bytes": sum(entry["size_bytes"] for entry in files),
        "file_count": len(files),
        "package_counts": dict(Counter(package["kind"] for package in packages)),
    }


def _packages(folder: Path, bundle: Bundle) -> list[dict[str, str]]:
    """Of its bill of materials; none where it has none."""
    if not any(entry.path == _BILL for entry in bundle.manifest.files):
        return []
    path = folder / _BILL
    try:
        components = json.loads(path.read_bytes())["components"]
        return [
            {"kind": c["purl"].removeprefix("pkg:").partition("/")[0], "name": c["name"], "version": c["version"]}
            for c in components
        ]
    except FileNotFoundError:
        raise BundleError(f"{path} does not exist", next_step="Take the bundle from its source again.") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BundleError(
            f"{path}: is no bill of materials", next_step="Take the bundle from its source again."
        ) from None
