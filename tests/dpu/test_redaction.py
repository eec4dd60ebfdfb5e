"""Secrets are left out by their type, wherever they stand."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SecretBytes, SecretStr

from meshfusion.dpu.config import ServiceConfig
from meshfusion.dpu.redaction import HIDDEN, redacted
from meshfusion.dpu.stacks import thread_stacks

PLANTED = "DHHC-1:00:planted-secret:"


class Inner(BaseModel):
    key: SecretStr = SecretStr(PLANTED)
    by_name: dict[str, SecretStr] = {"a": SecretStr(PLANTED)}
    several: tuple[SecretBytes, ...] = (SecretBytes(PLANTED.encode()),)
    path: Path = Path("/a")


class Unheard:
    """A type that nobody has thought of."""

    def __str__(self) -> str:
        return PLANTED


class Outer(BaseModel, arbitrary_types_allowed=True):
    name: str = "shown"
    inner: Inner = Inner()
    many: list[Inner] = [Inner()]
    none: SecretStr | None = None
    unheard: Any = Unheard()


def test_secrets_are_left_out_by_type_at_any_depth() -> None:
    shown = redacted(Outer())
    assert PLANTED not in json.dumps(shown)
    assert shown["name"] == "shown"
    assert shown["inner"] == {"key": HIDDEN, "by_name": {"a": HIDDEN}, "several": [HIDDEN], "path": "/a"}
    assert shown["none"] is None
    assert shown["unheard"] == "(not shown: Unheard)"


def test_a_whole_configuration_is_shown() -> None:
    config = ServiceConfig.model_validate(
        {"listen": "unix:///run/mf/s", "pool": {"path": "/p"}, "exports": {"target": "nvmet", "portals": ["rdma://10.0.0.1:4420"]}}
    )  # fmt: skip
    shown = redacted(config)
    assert shown["pool"]["path"] == "/p"
    assert shown["exports"]["portals"] == ["rdma://10.0.0.1:4420"]
    assert "(not shown" not in json.dumps(shown)


def test_no_field_of_the_service_holds_a_secret_as_plain_text() -> None:
    """One that is called like a secret is a path to it, of a type that is left out, or how long one lives."""
    called_so = re.compile(r"secret|password|passphrase|token|credential|(^|_)key($|_)")
    for name, annotation in fields(ServiceConfig):
        if called_so.search(name):
            is_number = not re.search(r"\b(str|bytes)\b", str(annotation)) and "float" in str(annotation)
            assert "Path" in str(annotation) or "Secret" in str(annotation) or is_number, name


def fields(model: type[BaseModel]) -> Iterator[tuple[str, Any]]:
    for name, info in model.model_fields.items():
        yield name, info.annotation
        for inner in (info.annotation, *getattr(info.annotation, "__args__", ())):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from fields(inner)


def test_stacks_name_threads_and_calls_and_no_values() -> None:
    value_that_nobody_may_see = PLANTED
    text = thread_stacks()
    assert "MainThread" in text
    assert "test_stacks_name_threads_and_calls_and_no_values" in text
    assert value_that_nobody_may_see not in text
