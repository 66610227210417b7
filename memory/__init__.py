"""Where a row of KV is, and how it moves."""
