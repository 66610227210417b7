"""Measuring: whole runs of the engine in this process, and single kernels.

A number is shown only after outputs were compared: two placements, or two engines, that disagree have no speed. Every command writes what
it measured, and on what, as one JSON object.

Parts
    floor.py    bytes a decode step must read, and the device's own copy bandwidth
    arm.py      one engine, one generation: tokens, times, counts
    probe.py    the loop's own time a step, and how long the device had nothing to do
    decode.py   decode steps in both placements against the floor
"""
