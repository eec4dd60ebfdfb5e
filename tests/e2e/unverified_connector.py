"""A negative control: the connector with its proof of loaded bytes (rule 4) taken out. For tests only."""

from __future__ import annotations

from meshfusion.host.connector.vllm import MeshFusionConnector as Verified


class MeshFusionConnector(Verified):
    """Believes whatever the medium gives."""

    @staticmethod
    def _is_digest_right(got: bytes, expected: bytes) -> bool:
        return True
