"""Command-line tools: mfctl, the quickstart job, benchmarks."""
