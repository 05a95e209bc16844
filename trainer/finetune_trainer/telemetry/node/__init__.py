"""The page of a node: a process that serves what the node's ranks share, whatever they do.

`start` is for whoever starts it; the rest is the process itself. It imports no torch, and touches
neither a disk nor a driver to answer.
"""
