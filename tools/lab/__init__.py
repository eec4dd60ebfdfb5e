"""A guest with soft-RoCE and the kernel's NVMe-oF target, on a machine without RDMA hardware, KVM or modules.

The guest's root is the host's ``/``, read-only under an overlay in memory: what runs on the host, a virtual
environment for instance, runs in the guest unchanged, and nothing that the guest does stays, except in its output
directory. Real protocol stacks, emulated speed: a run proves function, not performance.

On the host: :mod:`.guest` boots and runs, :mod:`.kernel` builds the kernel, :mod:`.keeper` holds a guest in the
background. In the guest: :mod:`.guest_agent` runs the commands, :mod:`.guest_setup` makes links, devices and targets.
"""
