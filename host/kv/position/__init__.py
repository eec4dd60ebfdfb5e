"""KV at another position: an opt-in library that nothing in this project calls; see docs/position.md.

Position is part of the identity of KV (rule 5), so KV at another position never matches. What a caller does with turned
keys is for the caller to justify: only for a layer whose inputs are equal are they the keys of the other position.
"""
