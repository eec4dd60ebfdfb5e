"""What to write, what to keep, what to reclaim: pure functions and state machines (docs/medium-policies.md).

No I/O, no clock, no random numbers: time and what was observed come in as arguments. ``medium_policy`` states what the
store calls, ``density_policy`` is the default, ``write_budget`` bounds the writes to each drive.
"""
