"""Sessions, scheduling, decode and append steps, the model, text, wire types and commands."""
