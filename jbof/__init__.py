"""The medium: on-media format, segments, digests, and the code that touches bytes."""
