"""SPDK's nvmf_tgt over JSON-RPC."""
