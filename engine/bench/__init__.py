"""Measuring: whole runs of the engine in this process, and single kernels.

A number is shown only after outputs were compared: two placements, or two engines, that disagree have no speed. Every command writes what
it measured, and on what, as one JSON object.

Parts
    floor.py    bytes a decode step must read, and the device's own copy bandwidth
    arm.py      one engine, one generation: tokens, times, counts
    probe.py    the loop's own time a step, and how long the device had nothing to do
    decode.py   decode steps in both placements against the floor
    timing.py   times of launches by graphs; cases.py, products.py, attention.py: single operations; kernels.py: they are checked and timed
    sweep.py    tilings of products, constants.py: constants of other kernels, tried against one another
    load.py     conversations of a seeded load; heard.py: what a request of it heard; serving.py: the load driven over HTTP
    many.py     many long sessions: what is asked and will be held; parts.py: by name; company.py: sessions filled once, and their turns
    sessions.py turns together, alone and against floors; placements.py: both placements; footprint.py, holdings.py: bytes; gap.py: waits
    channel.py  channels between two processes beside bare connections; channel_peer.py: the other process
    round.py    one round of the hot cache, and attention by its plan
"""
