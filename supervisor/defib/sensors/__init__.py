"""Floor 5: the world to events. Sensors post facts and decide nothing."""
