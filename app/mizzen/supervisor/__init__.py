"""Starts, watches, restarts and drains the processes of one service. The policy decides; the loop only carries out."""
