"""The vLLM connector: load it with ``kv_connector_module_path="meshfusion.host.connector.vllm"``.

--kv-transfer-config '{"kv_connector": "MeshFusionConnector",
  "kv_connector_module_path": "meshfusion.host.connector.vllm", "kv_role": "kv_both",
  "kv_load_failure_policy": "recompute",
  "kv_connector_extra_config": {"pool": {"path": "/var/lib/meshfusion/pool"}}}'
"""

from meshfusion.host.connector.vllm.connector import MeshFusionConnector

__all__ = ["MeshFusionConnector"]
