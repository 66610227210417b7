"""Throughput of machines that are not here: sessions that decode through a pipeline of stages, in virtual time.

Parts: `costs.py` (how long a stage works on a batch), `article.py` (published rows: what is fitted, what is held out).
"""
