"""The chunk service: index, leases, grants, generations, and its API."""
