"""A service's configuration without a look at its surroundings: directories that it names may not be there."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from meshfusion.dpu.config import ServiceConfig, load_service_config, read_config_file
from meshfusion.dpu.config_tenants import pools_problems


def config_alone(path: Path) -> ServiceConfig:
    """Raises as :func:`~meshfusion.dpu.config.load_service_config` for what is wrong with the file itself."""
    document = read_config_file(path)
    if document.duplicates:
        return load_service_config(path)  # as below
    try:
        config = ServiceConfig.model_validate(document.data)
    except ValidationError:
        return load_service_config(path)  # which tells all that is wrong
    if any(pools_problems(document.data, frozenset(), closely=False)):
        return load_service_config(path)
    return config
