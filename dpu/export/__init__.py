"""Exports as desired state: which namespaces exist, who may reach them, and where.

``desired`` holds what should be so and ``actual`` what a target reports; ``diff`` compares them, ``reconcile`` applies
the difference. Creating and replaying after a restart are one path. Targets: ``spdk``, ``nvmet`` and ``local``.
"""
