"""Defaults that are other modules': written down twice, so that options need not import them, and compared here."""

from __future__ import annotations

from dataclasses import fields

import yaml

from meshfusion.dpu.config import MediumConfig
from meshfusion.dpu.config_example import example_service_config
from meshfusion.dpu.config_exports import SpdkConfig
from meshfusion.dpu.store.tidying import REWRITE_SHARE
from meshfusion.host.connector.config import ConnectorConfig
from meshfusion.jbof.nvme.settings import ControllerSettings
from meshfusion.jbof.sizes import parse_size_bytes
from meshfusion.tools.mfctl.plan_command import plan
from meshfusion.tools.mfctl.plan_options import CHUNK_MAX_BYTES, CHUNK_MIN_BYTES
from meshfusion.tools.plan.given import BY_NAME


def test_defaults_are_those_of_the_code() -> None:
    assert BY_NAME["free_fraction"].default == MediumConfig.model_fields["free_fraction"].default
    assert BY_NAME["rewrite_share"].default == REWRITE_SHARE
    assert BY_NAME["target_cores"].default == SpdkConfig.model_fields["cores"].default
    (queues,) = (field.default for field in fields(ControllerSettings) if field.name == "io_queue_count")
    assert BY_NAME["queues_per_path"].default == queues
    (chunk_min,) = (option.default for option in plan.params if option.name == "chunk_min_bytes")
    field = ConnectorConfig.model_fields["chunk_min_bytes"]
    assert parse_size_bytes(chunk_min) == field.default
    bounds = {name: value for mark in field.metadata for name in ("ge", "le") if (value := getattr(mark, name, None))}
    assert bounds == {"ge": CHUNK_MIN_BYTES, "le": CHUNK_MAX_BYTES}


def test_the_memory_of_the_target_is_the_example_of_the_configuration() -> None:
    lines = [line.strip(" #") for line in example_service_config().splitlines()]
    (memory,) = (yaml.safe_load(line)["memory"] for line in lines if line.startswith("memory:"))
    assert BY_NAME["target_memory"].default == parse_size_bytes(memory)
