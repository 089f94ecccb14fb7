"""Floor 3: the only doors to clock, tasks, files and sockets."""
