"""A pool that was exported, and that nobody serves: its target is found through the service's configuration."""

from __future__ import annotations

import uuid
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from meshfusion.jbof.errors import ConfigError

if TYPE_CHECKING:
    from meshfusion.dpu.config import ServedPool, ServiceConfig
    from meshfusion.dpu.pool_rebuild import HasHosts


def exported_pool(path: Path, config_path: Path) -> ServedPool:
    """What the configuration says of the pool at ``path``. Raises ConfigError when it exports nothing, and as
    :func:`pool_of`."""
    from meshfusion.dpu.config import load_service_config

    config = load_service_config(config_path)
    if config.exports is None:
        raise ConfigError(
            f"{config_path} has no exports, so it names no target", next_step="name the service's configuration"
        )
    return pool_of(path, config, config_path)


def pool_of(path: Path, config: ServiceConfig, config_path: Path | None) -> ServedPool:
    """Which of the configuration's pools the one at ``path`` is. Raises ConfigError where several have other paths."""
    if config.pools is None:
        return config.served[0]
    for served in config.served:
        if served.pool.path.resolve() == path.resolve():
            return served
    paths = ", ".join(str(served.pool.path) for served in config.served)
    raise ConfigError(f"{path} is no pool of {config_path}", next_step=f"name one of them: {paths}")


def target_of(path: Path, served: ServedPool) -> HasHosts:
    """Asks whether a host reaches the pool."""
    from meshfusion.dpu.export.opening import has_hosts
    from meshfusion.dpu.pool_dir import PoolLayout

    exports = served.exports
    assert exports is not None, "as the configuration has some"

    def ask(pool_uuid: uuid.UUID, exported_as: str) -> bool:
        return partial(has_hosts, exports)(pool_uuid, exported_as, PoolLayout(path.absolute()))

    return ask
