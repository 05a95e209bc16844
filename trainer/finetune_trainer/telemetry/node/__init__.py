"""Serve the page of a node from a process that reads the shared state of the node's ranks.

`start_page` starts it from another process; the other modules run in the process itself, which
imports no torch and serves requests without access to a disk or a driver.
"""
