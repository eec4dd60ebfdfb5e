"""Engine versions whose end-to-end tests ran (rule 6): these start, others are refused by name."""

from __future__ import annotations

SUPPORTED_MINORS = ("0.30", "0.31", "0.32")
SEVERAL_RANKS_MINORS = ("0.32",)
"""With several tensor-parallel ranks."""
