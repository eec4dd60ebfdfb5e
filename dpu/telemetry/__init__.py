"""What the service tells of itself: metrics, health, logs with request ids, events."""
