"""The gate: is the offloaded run as fast as the resident one, with the same output?

It drives the real HTTP server over SSE, a fresh process each run, in the order A B, B A, A B (A resident, B offload), with pairs of two
resident runs between, null pairs, so that what the machine does by itself is known. Tracing is off. Outputs are compared before speed.

Parts
    plan.py     what to do, checked
    prompt.py   the ids every run sends
    process.py  a server process of its own
    answer.py   one stream of events: ids, text, times
    runs.py     the runs, in order
    verdict.py  losses, null spread, verdicts: pure arithmetic
    report.py   pass or fail, JSON, table
    machine.py  device, driver, versions, commit, host settings

Chosen
    Tokens come from the server's usage, times from [DONE] and the first event that carried tokens. A text may lag behind its tokens
    (half a character), so the first event with tokens is the one whose tokens are taken off.
    Misses come from GET /statistics before and after the measured request: engine counts are exact and cost a request no field.
    Each process first gives one short answer: kernels are compiled then, not while the second token is awaited.
    Depths of drafts are modes, one gate after another in one report: every mode must say the same text, and within a pair both runs must
    have accepted the same drafts. A forced rate of acceptance is in the plan and over the table.
    A run that fails fails its pair and the next run goes on; a server that does not come up ends the gate, because no other would.
"""

from engine.gate.plan import Plan, parse_history
from engine.gate.report import Outcome, all_pass, as_json, modes_as_json, outcome, table, write_json
from engine.gate.runs import Runs, Start, Watch

__all__ = [
    "Outcome", "Plan", "Runs", "Start", "Watch", "all_pass", "as_json", "modes_as_json", "outcome", "parse_history", "table", "write_json",
]  # fmt: skip
