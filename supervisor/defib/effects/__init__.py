"""Floor 5: commands to the world. An expected failure is a result, not an exception."""
