"""The process in the guest that runs commands for the host, and the frames they talk in.

Only the standard library: it starts without site-packages, so that a guest is up in a fraction of a second.
"""
