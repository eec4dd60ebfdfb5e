"""Kubernetes manifests of the service, its engines and its monitoring, from the service's configuration.

They are made by typed code and not by templates of Helm: the configuration is read by the service's own model, so that
a pod mounts, opens and probes what the service will use, and a mistake is told by field before anything is applied.
Nothing here does I/O.
"""
