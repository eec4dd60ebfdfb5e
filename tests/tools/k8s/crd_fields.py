"""Custom resources as their public definitions have them: the few fields that are used here, and no others.

Sources, read in December 2026:

- PodMonitor, PrometheusRule: github.com/prometheus-operator/prometheus-operator, `example/prometheus-operator-crd` and
  `Documentation/api-reference/api.md`, commit 6adcebc50 (August 2026).
- DPUService: github.com/NVIDIA/doca-platform, `api/dpuservice/v1alpha1/dpuservice_types.go`. `security` is in newer
  releases only, where it is required for DPUs; v24.10 does not know it.
- DPUFlavor: the same, `api/provisioning/v1alpha1/dpuflavor_types.go`; enumerations and patterns are the
  newer releases'.

Whole definitions: ``python -m tests.tools.k8s.against_crds FOLDER``.
"""

from __future__ import annotations

from typing import Any, Final

Schema = dict[str, Any]

_TEXT: Final[Schema] = {"type": "string", "minLength": 1}
_TEXTS: Final[Schema] = {"type": "array", "items": _TEXT}
_LABELS: Final[Schema] = {"type": "object", "additionalProperties": {"type": "string"}}
_DURATION: Final[Schema] = {"type": "string", "pattern": r"^(0|([0-9]+[smhdwy])+)$"}


def of(required: tuple[str, ...], **fields: Schema) -> Schema:
    return {"type": "object", "properties": fields, "required": list(required), "additionalProperties": False}


def many(item: Schema) -> Schema:
    return {"type": "array", "items": item, "minItems": 1}


_RELABELING: Final = of(
    (),
    action={"enum": ["replace", "keep", "drop", "labelmap", "labeldrop", "labelkeep"]},
    replacement=_TEXT,
    sourceLabels=_TEXTS,
    targetLabel=_TEXT,
)
_POD_MONITOR: Final = of(
    ("selector", "podMetricsEndpoints"),
    selector=of((), matchLabels=_LABELS),
    podMetricsEndpoints=many(of((), port=_TEXT, path=_TEXT, interval=_DURATION, relabelings=many(_RELABELING))),
)
_RULE: Final = of(("expr",), alert=_TEXT, expr=_TEXT, labels=_LABELS, annotations=_LABELS, **{"for": _DURATION})
_PROMETHEUS_RULE: Final = of(("groups",), groups=many(of(("name",), name=_TEXT, rules=many(_RULE))))
_SOURCE: Final = of(
    ("repoURL", "version"),
    repoURL={"type": "string", "pattern": "^(oci://|https://).+$"},
    chart=_TEXT,
    version=_TEXT,
    releaseName=_TEXT,
)
_DPU_SERVICE: Final = of(
    ("helmChart", "security"),
    serviceID=_TEXT,
    helmChart=of(("source",), source=_SOURCE, values={"type": "object"}),
    security=of(("privileged",), privileged={"type": "boolean"}),
)
_NV_CONFIG: Final = of(
    ("parameters",),
    device={"enum": ["*", "p0", "p1", "P0", "P1"]},
    parameters=many({"type": "string", "pattern": r"^[^=\s]+=[^\s]*$", "maxLength": 200}),
)
_CONFIG_FILE: Final = of((), path=_TEXT, operation={"enum": ["override", "append"]}, raw=_TEXT, permissions=_TEXT)
_DPU_FLAVOR: Final = of(
    (),
    grub=of((), kernelParameters=_TEXTS),
    nvconfig={**many(_NV_CONFIG), "maxItems": 3},
    configFiles=many(_CONFIG_FILE),
)

CRDS: Final[dict[tuple[str, str], Schema]] = {
    ("monitoring.coreos.com/v1", "PodMonitor"): _POD_MONITOR,
    ("monitoring.coreos.com/v1", "PrometheusRule"): _PROMETHEUS_RULE,
    ("svc.dpu.nvidia.com/v1alpha1", "DPUService"): _DPU_SERVICE,
    ("provisioning.dpu.nvidia.com/v1alpha1", "DPUFlavor"): _DPU_FLAVOR,
}
"""The schema of ``spec``, by ``apiVersion`` and ``kind``."""
