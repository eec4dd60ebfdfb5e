"""Tests mirror the tree: tests/jbof/test_digest.py tests jbof/digest.py. Helpers are imported as tests.X."""
