"""FlexPath: reads and writes of namespaces spread over several paths. A *path* is a local port and a target portal.

No bonding and no special set-up of switches: every path is a connection of its own, with its own queue pairs.
"""
