"""Manifests as YAML, as kubectl reads it and people do."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

import yaml

from meshfusion.tools.k8s.names import Manifest

# Kubernetes' reader takes y and n for booleans and 1e3 for a number, PyYAML for texts, which it would not quote.
_DOUBTFUL: Final = re.compile(r"[yYnN]|[-+.]?[0-9].*")
_WIDTH: Final = 110


class _Dumper(yaml.SafeDumper):
    """Without aliases; texts of several lines are blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else '"' if _DOUBTFUL.fullmatch(value) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def yaml_stream(manifests: Iterable[Manifest]) -> str:
    """One document each."""
    text: str = yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, explicit_start=True, width=_WIDTH)
    return text
