"""Archives: a session in a directory, written behind the barrier and read into a fresh session. The format is `docs/archive.md`.

Parts
    manifest.py   what manifest.json says, its checksum and its version
    parts.py      which bytes of a block are rows, which are keys, and where a piece of them lies in a segment
    checks.py     whether a manifest is consistent, and whether it is of this engine's model and formats
    identity.py   what an engine's sessions belong to: architecture, weights, formats, layers
    directory.py  the directory: its lock, names, durable renames, leftovers
    writer.py     one export, blocking; reader.py: one import, blocking
    checksums.py  what tells one layer's weights from another's
    places.py     a session's blocks on all stages
    ahead.py      blocking work in threads, a few pieces at a time, followed in order on the loop
    transfers.py  `Archives`: sessions of an engine out and in
    stages.py     archives of layer ranges into one, and back; listing.py: what lies in a directory, for the command line

Invariants
    1. A segment never changes once its name exists; the manifest is renamed last, and everything it names is on disk before it.
    2. Whatever is read is compared with its checksum before the session is visible to anybody.
    3. An export that fails or is killed leaves the archive that was there; one that is refused or killed while importing leaves no session.

Choices
    A segment is bytes and nothing else: numpy maps it. All that describes it is in the manifest, checksums of 64-row pieces included.
    What a second export may leave out is decided by the bytes themselves (12 GB/s of xxh3 a core), not by remembering: so a truncated,
    regrown, forked or restored session needs no bookkeeping to be right.
    Segments begin at whole blocks. A grown tail is written again, at most 63 rows of it, and the older segment counts fewer rows.
"""
