"""A stage in a process of its own, and the head that drives it from another.

A *node* is one process with one stage: its layers' weights, arena, rings and hot caches, and one loop. The *head* serves HTTP, decides, and
has the last stage, which samples. They speak over channels (streams/channel.py): the head to every node in calls and answers, each stage to
the next directly, with activations. Nobody keeps a list of members: the head's settings name the nodes, and systemd or Ray keeps their
processes alive.

Parts
    address.py    where a node listens; `keys.py`: what head, nodes and doctor read of settings alike
    agreement.py  what all of a cluster must agree on before a word is exchanged: layers of each stage, formats, settings
    wire.py       what travels on the control channel; `calls.py`: the bodies of calls
    caller.py     the head's end of it: ordered calls as events; `answering.py`: the node's end
    passage.py    tensors between the streams of two processes
    process.py    the node; `held_stage.py`: what it has for life; `hosting.py`: the calls of one head to its stage
    head.py       the head: meets the nodes, joins their stages, and again after a loss; `opening.py`: from settings
    remote.py     a stage on a node as the head asks it (engine/stage_calls.py), with `remote_memory.py`, `remote_append.py`,
                  `remote_image.py`; `far.py`, `far_session.py`, `far_room.py`, `handover.py`: what the head knows of a node, of a session
                  there, of its room, and of what stages hand on
    ray_nodes.py  nodes as Ray actors
    visit.py      the doctor at all nodes; `report.py`, `comparison.py`; `waiting_room.py`: a node without a stage

Invariants
    1. Calls reach a node in the order they were made, and begin there in that order; each gets exactly one answer, or the one `PeerLost` of
       its channel.
    2. Whoever makes calls faster than the node takes them is told (`Full`), never kept waiting inside a call.
    3. A node that is lost takes nothing with it: other nodes keep process, arena and sessions.
"""
