"""Throughput of machines that are not here: sessions that decode through a pipeline of stages, in virtual time.

Parts: `costs.py` (how long a stage works on a batch), `article.py` (published rows: what is fitted, what is held out), `pipeline.py` (the
run, on the virtual backend), `sweeps.py` (the check against the published rows, and curves), `chart.py` and `report.py` (pictures, tables).

Invariants:
1. Two numbers are fitted, to two single-session rows; every other one has a source beside it, or is called a guess.
2. What is fitted and what is held out was written down before the first run.
3. Nothing here knows what this engine would take on those nodes: the fitted times are those of the program that was measured there.
"""
