"""Opening the pool for an engine: embedded in this process, or a service elsewhere."""

from __future__ import annotations

import logging

from meshfusion.dpu.api import types as api
from meshfusion.host.connector.config import ConnectorConfig, EmbeddedPool

logger = logging.getLogger("meshfusion.pool")


def open_service(config: ConnectorConfig) -> api.ChunkService:
    """Raises a :class:`MeshFusionError` that says what is wrong with the pool or the service."""
    if config.service is not None:
        from meshfusion.dpu.api.client import GrpcChunkService

        return GrpcChunkService(config.service, config.security)
    assert config.pool is not None
    return _open_embedded(config.pool)


def _open_embedded(pool: EmbeddedPool) -> api.ChunkService:
    # The embedded form is the service itself, in this process: the one place where the host reaches past the API.
    from meshfusion.dpu.pool import Pool, PoolOptions
    from meshfusion.dpu.pool_create import create_pool
    from meshfusion.dpu.pool_place import is_free
    from meshfusion.dpu.pool_tending import Policy

    if is_free(pool.path):
        create_pool(pool.path, size_bytes=pool.size, segment_bytes=pool.segment_size)
        logger.info("made a new pool of %d bytes at %s", pool.size, pool.path)
    return Pool.open(pool.path, PoolOptions(policy=Policy(pool.policy)))
