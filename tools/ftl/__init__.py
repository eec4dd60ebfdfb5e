"""A model of what happens inside a drive: how many pages its flash writes for each page that the host writes.

``geometry`` the drive's dimensions; ``device`` a page-mapped flash translation layer on them (``kernels`` are its
compiled loops); ``analytic`` what theory says about it; ``segment_pattern`` and ``file_pattern`` what a pool and a file
system write; ``measure`` runs one on the other. What the model leaves out is in docs/device-waf.md.
"""
