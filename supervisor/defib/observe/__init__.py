"""Floor 5: what we tell people and programs about ourselves."""
