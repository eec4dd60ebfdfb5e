"""Encryption at rest: a pool whose drives are dm-crypt mappings of slices, with their headers and key elsewhere."""
