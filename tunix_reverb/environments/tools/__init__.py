"""Episodes of turns with tools: calls, limits, sandboxes, transcripts."""
