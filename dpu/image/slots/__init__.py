"""Changing the service on a card without flashing it: two slots, of which one runs and the other can be tried.

Which slot runs is decided on the card (``data/slotctl``), so that it comes back by itself whatever happens to whoever
upgrades it. Here is what is said to the card, as a state machine, and what is known before.
"""
