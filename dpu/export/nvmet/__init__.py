"""The kernel's NVMe-oF target over configfs."""
