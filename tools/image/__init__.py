"""Building service bundles: packages by a lock, reproducible layers, an OCI image, and what a card needs beside it.

A bundle's content comes from three places: Debian packages and wheels that a committed lock names by their digests, and
a commit of this repository. No program of the target's architecture runs while one is built, and nothing needs root.
Reading and checking bundles is in :mod:`meshfusion.dpu.image`.
"""
