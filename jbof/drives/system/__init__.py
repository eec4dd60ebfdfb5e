"""Linux' side of the drives: sysfs, ioctls, locks. The only part of :mod:`meshfusion.jbof.drives` that does I/O."""
