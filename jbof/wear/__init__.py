"""Where the next segment is opened among drives, so that they wear evenly. No I/O, no clock.

``state`` what is known of a drive; ``shares`` what part of the openings each drive should get; ``choice`` the next
drive; ``spread`` which open segment a shard goes to; ``placement`` what a drive is told of data's lifetime;
``outlook`` how even wear can become at all.
"""
