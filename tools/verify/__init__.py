"""The acceptance test of an installation: what one engine computes, another one loads, and both are compared."""
