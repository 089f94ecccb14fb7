"""Floor 6: the only places that wire things together."""
