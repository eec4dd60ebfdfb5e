"""The OCI images of a bundle: the service's, in layers of which only the last changes from commit to commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from meshfusion.dpu.image.bundle import ImageEntry
from meshfusion.tools.image.base_content import base_entries
from meshfusion.tools.image.deb_content import deb_entries
from meshfusion.tools.image.errors import BuildError
from meshfusion.tools.image.formats_label import formats_label
from meshfusion.tools.image.host_files import CACHE, MFCTL
from meshfusion.tools.image.oci_layout import LayoutWriter, new_layout
from meshfusion.tools.image.plan import REPOSITORY, Plan, Told, tag_of
from meshfusion.tools.image.service_needs import CONFIG_FILE
from meshfusion.tools.image.source import source_entries
from meshfusion.tools.image.spdk import SpdkImage, SpdkPackages, copy_image, spdk_tree
from meshfusion.tools.image.tree import Tree
from meshfusion.tools.image.wheel_content import wheel_entries

_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def write_images(plan: Plan, folder: Path, told: Told) -> list[ImageEntry]:
    """The layout in ``folder``, which is made. Raises BuildError and OSError."""
    writer = new_layout(folder)
    layers = []
    taken: dict[str, str] = {}
    for what, make in _layers(plan):
        told(f"unpacking {what}", 0, 0)
        tree = make()
        _check_apart(tree, what, taken)
        layers.append(writer.add_layer(tree, what, _bytes_told(told, f"packing {what}", tree.size_bytes)))
    service = writer.add_image(layers, plan.architecture, _settings(plan), plan.created)
    named = [(plan.reference, service)]
    images = [ImageEntry(role="service", reference=plan.reference, digest=service["digest"])]
    if isinstance(plan.spdk, SpdkImage):
        reference = spdk_reference(plan.spdk)
        named.append((reference, _copied(plan.spdk, writer)))
        images.append(ImageEntry(role="spdk", reference=reference, digest=plan.spdk.descriptor.digest))
    writer.write_index(named)
    return images


def spdk_reference(image: SpdkImage) -> str:
    """Of the operator's image, by its digest: two different ones never have one name."""
    return f"{REPOSITORY}-spdk:{tag_of(image.descriptor.digest.partition(':')[2][:16])}"


def _check_apart(tree: Tree, what: str, taken: dict[str, str]) -> None:
    """A layer hides files of those below it, which would then not be what the lock says. ``taken``: those so far."""
    for entry in tree.entries():
        if not entry.is_directory and taken.setdefault(entry.path, what) != what:
            raise BuildError(
                f"{what}: /{entry.path} is in the image already, from {taken[entry.path]}",
                next_step="Leave one of the two out: see the lock, --spdk-deb and the repository.",
            )


def _layers(plan: Plan) -> Iterator[tuple[str, Callable[[], Tree]]]:
    """Each with what it holds. The ones that change least are at the bottom: an upgrade copies what is new."""
    yield "Debian packages", lambda: _debian(plan)
    if isinstance(plan.spdk, SpdkPackages):
        packages = plan.spdk
        yield "SPDK", lambda: spdk_tree(packages, plan.architecture)
    yield "wheels", lambda: _wheels(plan)
    yield "MeshFusion", lambda: _own(plan)


def _debian(plan: Plan) -> Tree:
    tree = Tree(frozenset(plan.architecture.links))
    tree.add_all(base_entries(plan.architecture), "the base")
    for package, path in plan.debs:
        tree.add_all(deb_entries(path), package.name)
    return tree


def _wheels(plan: Plan) -> Tree:
    tree = Tree()
    for package, path in plan.wheels:
        tree.add_all(wheel_entries(path, package.name), package.name)
    return tree


def _own(plan: Plan) -> Tree:
    tree = Tree()
    tree.add_all(source_entries(plan.source, plan.version), "meshfusion")
    return tree


def _settings(plan: Plan) -> dict[str, Any]:
    return {
        "Env": [f"PATH={_PATH}", f"NUMBA_CACHE_DIR={CACHE}", f"PYTHONPYCACHEPREFIX={CACHE}/python"],
        "Cmd": [MFCTL, "service", "run", "--config", str(CONFIG_FILE)],
        "Labels": {
            "org.opencontainers.image.title": "meshfusion",
            "org.opencontainers.image.version": plan.version,
            "org.opencontainers.image.revision": plan.source.commit,
            "org.opencontainers.image.licenses": "Apache-2.0",
            **formats_label(plan.source, plan.version),
        },
    }


def _copied(image: SpdkImage, writer: LayoutWriter) -> dict[str, Any]:
    copy_image(image, writer.folder)
    return image.descriptor.model_dump(include={"mediaType", "digest", "size"})


def _bytes_told(told: Told, what: str, total_bytes: int) -> Callable[[int], None]:
    done_bytes = 0

    def moved(count_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += count_bytes
        told(what, done_bytes, total_bytes)

    return moved
