"""Run in the guest, as root: RDMA links, block devices, kernel NVMe-oF targets. Everything can be taken down again.

What is to be done is computed first, as :mod:`.steps`, then carried out. ``python -m meshfusion.tools.lab.guest_setup``
is the same for shell scripts.
"""
