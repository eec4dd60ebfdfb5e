"""``mfctl plan``: how large a pool must be for a workload. Pure, but for the model's description and traces.

``formula`` what a formula is, and evaluating a table of them; ``model_form`` a model's KV as the connector cuts it;
``given`` what a user states; ``model``, ``bandwidth``, ``capacity``, ``service`` the formulas; ``checks`` what must be
enough for what; ``plan`` all of it; ``replay`` a trace instead of assumptions; ``document`` docs/sizing.md.
"""
