"""``mizzen chat``: the interactive shell, against a server's URL or with an engine of its own.

It is a client like any other: everything goes through the HTTP API, also to its own engine.
"""

from mizzen.chat.main import main

__all__ = ["main"]
