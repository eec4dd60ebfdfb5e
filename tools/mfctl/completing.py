"""What a shell offers to complete: names of contexts and of their services."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import click


def context_names(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Nothing where the file cannot be read: a shell that completes shows no errors."""
    return _beginning_with(incomplete, _mapping(_document().get("contexts")))


def service_names(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Of the context that is named on the line, or the current one."""
    document = _document()
    chosen = context.find_root().params.get("context_name") or document.get("current")
    found = _mapping(_mapping(document.get("contexts")).get(chosen))
    return _beginning_with(incomplete, _mapping(found.get("services")))


def _document() -> Mapping[Any, Any]:
    """As it stands there: whoever presses a key does not wait for what it takes to judge it."""
    import yaml

    from meshfusion.jbof.errors import MeshFusionError
    from meshfusion.tools.mfctl.context_file import contexts_path

    try:
        return _mapping(yaml.safe_load(contexts_path(os.environ).read_bytes()))
    except (MeshFusionError, OSError, ValueError, yaml.YAMLError):
        return {}


def _mapping(value: object) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else {}


def _beginning_with(incomplete: str, names: Mapping[Any, Any]) -> list[str]:
    return [name for name in names if isinstance(name, str) and name.startswith(incomplete)]
