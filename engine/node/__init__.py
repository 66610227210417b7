"""A stage in a process of its own, and the head that drives it from another.

A *node* is one process with one stage: its layers' weights, arena, rings and hot caches, and one loop. The *head* serves HTTP and decides;
it has no layers. They speak over channels (streams/channel.py): the head to every node over a control channel of calls and replies, nodes
to one another directly, with activations. Nobody keeps a list of members: the head's settings name the nodes, and systemd or Ray keeps
their processes alive.

Parts
    address.py    where a node listens
    agreement.py  what all of a cluster must agree on before a word is exchanged: layers of each stage, formats, settings
    wire.py       what travels on the control channel
    caller.py     the head's end of it: ordered calls as events; `answering.py`: the node's end

Invariants
    1. Calls reach a node in the order they were made, and begin there in that order; each gets exactly one answer, or the one `PeerLost` of
       its channel.
    2. Whoever makes calls faster than the node takes them is told (`Full`), never kept waiting inside a call.
    3. A node that is lost takes nothing with it: other nodes keep process, arena and sessions.
"""
