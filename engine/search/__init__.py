"""Search for bad interleavings: scenarios over the real engine and the real memory layer, under many seeds, on the virtual backend.

A seed chooses the order of every completion, how far the host gets in between, what fails or is late, and what the scenario draws. The
scenarios run a tiny model, or rows without a model, so that a seed takes a fraction of a second and everything can be compared.

Parts
    tiny.py            a tiny random model
    reference.py       what a script says and leaves when nothing disturbs it: resident, in order
    watch.py           the oracle: rows in RAM at every rise of a count, all of a session at its end, nothing held after it
    watched_rounds.py  the oracle inside a step: every plan and every gathered byte
    scenario.py        a scenario, one sealed run of it, and its finding
    clients.py         clients of a watched engine; conversations.py: scenarios with them; branches.py: forks, and prompts that begin alike
    ground.py          sessions of the memory layer without a model; lives.py: scenarios with them; images.py: read out and loaded;
                       appends.py: prompts; forks.py: families of them
    awaits.py          a coroutine cancelled at its nth await; cuts.py: scenarios that try all of them in turn
    hunt.py            many seeds over many processes, the smallest that fails, its tape

Invariants
    1. A seed is the whole reproduction: the same commit, scenario and seed give the same run.
    2. What a scenario finds is named by the oracle that saw it, not by the operation that failed because of it.
    3. The oracle does not use what it checks: references are resident and in order, and rows of lives are arithmetic.

Choices
    Freed blocks and buffers are filled with poison: the guards of the virtual backend then see whoever still uses them.
    The watch polls every loop round instead of listening to completions: a count is then judged between operations, as the host sees it.
    Scenarios take turns by weight along the seeds, so that any number of seeds covers all of them.
"""
