"""A service's configuration without a look at its surroundings: directories that it names may not be there. And what
it says to those who start the service."""

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


def asks_who_calls(config: ServiceConfig) -> bool:
    """Also where its own user calls? On a socket beside other addresses it does not."""
    has_own_socket = len({type(address) for address in config.addresses}) > 1
    return not has_own_socket and (config.tls is not None or config.tokens_file is not None)


def security_files(config: ServiceConfig) -> tuple[Path, ...]:
    """That say who the service is, and who may call it."""
    tls = config.tls
    named = () if tls is None else (tls.certificate, tls.key, tls.client_ca)
    return tuple(path for path in (*named, config.tokens_file) if path is not None)
