"""What theory says of write amplification: the independent source that the model is checked against."""

from __future__ import annotations

import math


def greedy_uniform(over_provisioning: float) -> float:
    """Write amplification of greedy garbage collection under uniform random page writes, for large superblocks.

    With ``a = 1 + over_provisioning`` it is ``a / (a + W(-a * exp(-a)))``, W being Lambert's function on its principal
    branch: Xiang and Kurkoski, "An Improved Analytic Expression for Write Amplification in NAND Flash" (2012), and
    Desnoyers, "Analytic Modeling of SSD Write Performance" (2012), from the chance that a page of the superblock next
    collected is still valid. For finite superblocks greedy is a little better.
    """
    assert over_provisioning > 0, over_provisioning
    share = valid_share_of_victim(over_provisioning)
    return 1 / (1 - share)


def valid_share_of_victim(over_provisioning: float) -> float:
    """The ``v`` in (0, 1) with ``v = exp(-a * (1 - v))``: what is left valid in the superblock that is collected.

    Found by bisection: the other solution is 1, and the difference changes its sign once below it.
    """
    a = 1 + over_provisioning
    low, high = 0.0, 1 - 1e-12
    if math.exp(-a * (1 - high)) > high:  # so little is spare that the solution cannot be told from 1
        return high
    for _ in range(200):
        middle = (low + high) / 2
        if math.exp(-a * (1 - middle)) > middle:
            low = middle
        else:
            high = middle
    return (low + high) / 2
