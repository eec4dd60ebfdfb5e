"""NVMe over Fabrics on RDMA, the host's side.

The codecs (everything that names no socket and no queue pair) are pure: values in, bytes out, and back. Numbers are
little-endian. Figures and sections are cited as

- **Base**: NVM Express Base Specification, revision 2.2
- **NVM**: NVM Express NVM Command Set Specification, revision 1.2
- **RDMA**: NVM Express RDMA Transport Specification, revision 1.0

Fields keep the names that they have there; what is derived from them has a name in words and a unit.

Above the codecs, from the wire up, without I/O, clock or randomness of their own (being built, used by nothing yet):

- :mod:`.queue`: one queue pair, and the truth about what became of each command;
- :mod:`.association`: the queue pairs of one controller, from Connect to the last one's death, with the procedures
  (:mod:`.bring_up`, :mod:`.inventory`) and what goes on by itself (:mod:`.upkeep`);
- :mod:`.controller`: one association after the other; :mod:`.transfers`: reads and writes of any length over it;
  :mod:`.session`: both as one.

:mod:`.transport` says what they want of a transport; :mod:`.rdma` is the one over pyverbs, and :mod:`.initiator` drives
all of it with a thread, for callers that wait.
"""
