"""NVMe over Fabrics on RDMA, the host's side.

The codecs (everything that names no socket and no queue pair) are pure: values in, bytes out, and back. Numbers are
little-endian. Figures and sections are cited as

- **Base**: NVM Express Base Specification, revision 2.2
- **NVM**: NVM Express NVM Command Set Specification, revision 1.2
- **RDMA**: NVM Express RDMA Transport Specification, revision 1.0

Fields keep the names that they have there; what is derived from them has a name in words and a unit.
"""
