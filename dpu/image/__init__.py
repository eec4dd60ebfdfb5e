"""Images for DPUs: the boot stream's format, what is checked before a card is flashed, the flash itself, and rollouts.

State machines and codecs do no I/O and read no clock; what touches cards lies in :mod:`meshfusion.dpu.image.edge`.
"""
