"""Cache policies on public request traces: ``mfctl sim`` and ``tools.bench.medium_policies``."""
