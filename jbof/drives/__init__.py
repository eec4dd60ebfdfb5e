"""The drives: what they are, how they are, where they stand, and who owns them.

Everything here is pure but for ``system``, which asks Linux. A *drive* is one namespace of one NVMe drive, or a file
that stands for one; almost all drives have one namespace. It is known by what it says of itself
(:mod:`.identity`), never by a path.
"""
