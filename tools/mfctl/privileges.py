"""What the service may do beyond what its user may, wherever it runs: a unit of systemd and a pod say the same."""

from __future__ import annotations


def capabilities(
    *, is_root: bool, has_devices: bool, exports_by_kernel: bool, is_encrypted: bool = False
) -> tuple[str, ...]:
    """Names without ``CAP_``. ``has_devices``: some drives are block devices; ``is_encrypted``: by the device mapper;
    ``exports_by_kernel``: over nvmet, whose settings are files below ``/sys``."""
    # Without DAC_OVERRIDE root could not use files of other users, which a pool's may be.
    found = ["DAC_OVERRIDE", "FOWNER"] if is_root else []
    if has_devices and is_encrypted:
        found.append("IPC_LOCK")  # cryptsetup keeps keys from being swapped out
    if has_devices and is_root:
        found += ["SYS_ADMIN", "SYS_RAWIO"]  # drives' health, reservations
    if exports_by_kernel and "SYS_ADMIN" not in found:
        found.append("SYS_ADMIN")
    return tuple(found)
