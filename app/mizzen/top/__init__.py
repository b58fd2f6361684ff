"""``mizzen top``: a server's traffic, latencies, memory and processes in the terminal, from its /metrics alone."""

from mizzen.top.main import main

__all__ = ["main"]
