"""Floor 1, pure: what the supervisor decides. No I/O, no clock: time arrives on events, timers leave as deadlines."""
