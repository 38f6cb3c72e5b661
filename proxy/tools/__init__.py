"""Function calling: what clients define, how models are told, and how their calls are read."""
