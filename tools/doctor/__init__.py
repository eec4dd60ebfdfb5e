"""What ``mfctl doctor`` looks at on a host, a DPU or a JBOF's server: kernel, RDMA, PCI Express, clock, ports, files.

Each check reads through :class:`~meshfusion.tools.doctor.machine.Machine` and gives findings; none raises, none runs a
program. What cannot be seen from here is said to be unseen, never to be well.
"""
