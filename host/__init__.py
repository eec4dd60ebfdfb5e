"""The shim inside the inference engine: connector, KV semantics, data paths."""
