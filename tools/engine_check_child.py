"""The child of :mod:`meshfusion.tools.engine_check`: each step as the engine takes it when it starts.

vLLM parses the option into ``KVTransferConfig``, has its factory find the connector's class
(``distributed/kv_transfer/kv_connector/factory.py``), and the class reads its own configuration.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from meshfusion.host.kv.versions import SUPPORTED_MINORS
from meshfusion.jbof.errors import MeshFusionError

_WANTED = f"vLLM {SUPPORTED_MINORS[0]} to {SUPPORTED_MINORS[-1]}"
_UNMODIFIED = f"Install an unmodified {_WANTED}."


class Step(NamedTuple):
    """As :class:`~meshfusion.tools.mfctl.findings.Finding`; ``state``: "ok" or "fail"."""

    check: str
    state: str
    cause: str
    remedy: str = ""


def examine(transfer: dict[str, Any]) -> Iterator[Step]:
    """Ends with the first step that fails."""
    for check, look in _STEPS.items():
        try:
            yield Step(check, "ok", look(transfer))
        except MeshFusionError as error:
            yield Step(check, "fail", error.message, error.next_step)
            return
        except Exception as error:  # whatever the engine raises about what it does not take
            cause = f"{type(error).__name__}: {' '.join(str(error).split())}"
            yield Step(check, "fail", cause, _UNMODIFIED)
            return


def _import(transfer: dict[str, Any]) -> str:
    try:
        engine = importlib.import_module("vllm")
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise MeshFusionError(
            "there is no vLLM in this Python",
            next_step=f"Run this on an engine's host, with the Python of its engine; or install {_WANTED}.",
        ) from error
    return str(Path(str(engine.__file__)).parent)


def _version(transfer: dict[str, Any]) -> str:
    from meshfusion.host.kv.identity import installed_engine_version, minor_version

    version = installed_engine_version()
    if minor_version(version) not in SUPPORTED_MINORS:
        raise MeshFusionError(
            f"vLLM {version} is not one of the proven versions", next_step=f"Install {_WANTED}: docs/models.md."
        )
    return f"vLLM {version}"


def _environment(transfer: dict[str, Any]) -> str:
    from meshfusion.host.kv.support import environment_refusals

    found = environment_refusals()
    if found:
        raise MeshFusionError("; ".join(found), next_step="Start the engine without it.")
    return "no variable that makes the engine another one"


def _parse(transfer: dict[str, Any]) -> str:
    from pydantic import TypeAdapter
    from vllm.config import KVTransferConfig

    parsed = TypeAdapter(KVTransferConfig).validate_json(json.dumps(transfer))
    if not parsed.is_kv_transfer_instance:
        raise MeshFusionError("the engine takes it for no transfer of KV", next_step="Set kv_connector and kv_role.")
    return f"KVTransferConfig, role {parsed.kv_role}, failed loads are {parsed.kv_load_failure_policy}d"


def _class(transfer: dict[str, Any]) -> str:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    found = KVConnectorFactory.get_connector_class(KVTransferConfig(**transfer))
    return f"{found.__module__}.{found.__qualname__}"


def _own(transfer: dict[str, Any]) -> str:
    from meshfusion.host.connector.config import EXTRA_CONFIG, parse_connector_config

    config = parse_connector_config(transfer[EXTRA_CONFIG])
    return f"{EXTRA_CONFIG}, tenant {config.tenant}, path {config.path.value}"


_STEPS: Final[Mapping[str, Callable[[dict[str, Any]], str]]] = {
    "vllm": _import,
    "vllm version": _version,
    "environment": _environment,
    "kv_transfer_config": _parse,
    "connector": _class,
    "connector's configuration": _own,
}


def main(transfer: str, answer: Path) -> None:
    """Writes the steps as a JSON list to ``answer``."""
    answer.write_text(json.dumps(list(examine(json.loads(transfer)))), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
