"""defib stands beside an LLM inference server and brings it back.

This package holds no code of its own at the top: see `docs/design.md` for the floors.
"""

__version__ = "0.1.0"
