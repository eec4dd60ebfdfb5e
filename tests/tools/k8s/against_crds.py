"""``python -m tests.tools.k8s.against_crds FOLDER``: the manifests against whole definitions of custom resources.

FOLDER holds CRDs as YAML files, at any depth, such as `example/prometheus-operator-crd` of the Prometheus operator and
`config` of NVIDIA's doca-platform. They are not part of this repository.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from tests.tools.k8s.cases import all_cases
from tests.tools.k8s.crd_fields import CRDS


def definitions(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    found = {}
    for path in sorted(folder.rglob("*.y*ml")):
        try:
            documents = list(yaml.safe_load_all(path.read_text()))
        except yaml.YAMLError:
            continue  # a template
        for document in documents:
            if isinstance(document, dict) and document.get("kind") == "CustomResourceDefinition":
                spec = document["spec"]
                for version in spec["versions"]:
                    key = f"{spec['group']}/{version['name']}", spec["names"]["kind"]
                    found[key] = strict(version["schema"]["openAPIV3Schema"])
    return found


def strict(schema: Any) -> Any:
    """What is not named is refused, as `kubectl apply` does it, but for what is any object."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items() if key not in ("format", "default")}
    is_open = made.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in made
    if made.get("type") == "object" and isinstance(made.get("properties"), dict) and not is_open:
        made["additionalProperties"] = False
        if "metadata" in made["properties"] and "spec" in made["properties"]:
            made["properties"]["metadata"] = {"type": "object"}
    return made


def main() -> int:
    known = definitions(Path(sys.argv[1]))
    bad = 0
    for name, manifests in all_cases().items():
        for manifest in manifests:
            key = (manifest["apiVersion"], manifest["kind"])
            if key not in CRDS:
                continue
            if key not in known:
                print(f"{name}: no definition of {key} in the folder")
                bad += 1
                continue
            errors = list(jsonschema.Draft202012Validator(known[key]).iter_errors(manifest))
            bad += len(errors)
            print(f"{name}: {key[1]}: {'; '.join(f'{list(e.path)}: {e.message}' for e in errors) or 'ok'}"[:400])
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
