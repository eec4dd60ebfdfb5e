"""The bill of materials of a bundle, as CycloneDX 1.6: each Debian package, each wheel, and MeshFusion itself."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from meshfusion.tools.image.architecture import SUITE

SPEC_VERSION: Final = "1.6"
_NAMESPACE: Final = uuid.UUID("6f1b2a3e-6a55-5d0a-9f0e-6d6573686675")


@dataclass(frozen=True, slots=True)
class Component:
    """``kind``: ``deb``, ``pypi`` or ``generic`` as in package URLs. ``sha256``: of the package's file, "" for none."""

    kind: str
    name: str
    version: str
    sha256: str = ""
    architecture: str = ""
    licence: str = ""

    @property
    def purl(self) -> str:
        """github.com/package-url/purl-spec."""
        name, version = quote(self.name, safe=""), quote(self.version, safe=":")
        if self.kind == "deb":
            return f"pkg:deb/debian/{name}@{version}?arch={self.architecture}&distro={SUITE}"
        return f"pkg:{self.kind}/{name}@{version}"


def sbom(name: str, version: str, created: str, manifest_seed: str, components: Iterable[Component]) -> dict[str, Any]:
    """``created``: RFC 3339. ``manifest_seed``: what the serial number is made from, so that it is the same for the
    same bundle and another for another."""
    return {
        "$schema": f"http://cyclonedx.org/schema/bom-{SPEC_VERSION}.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": SPEC_VERSION,
        "serialNumber": f"urn:uuid:{uuid.uuid5(_NAMESPACE, manifest_seed)}",
        "version": 1,
        "metadata": {
            "timestamp": created,
            "component": {"type": "application", "bom-ref": "bundle", "name": name, "version": version},
        },
        "components": [_as_json(component) for component in sorted(components, key=lambda c: c.purl)],
    }


def _as_json(component: Component) -> dict[str, Any]:
    found: dict[str, Any] = {
        "type": "application" if component.kind == "generic" else "library",
        "bom-ref": component.purl,
        "name": component.name,
        "version": component.version,
        "purl": component.purl,
    }
    if component.sha256:
        found["hashes"] = [{"alg": "SHA-256", "content": component.sha256}]
    if component.licence:
        found["licenses"] = [{"expression": component.licence}]
    return found
