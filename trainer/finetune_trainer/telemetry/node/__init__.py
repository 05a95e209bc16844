"""The page of a node: a process that serves what the node's ranks share, whatever they do.

`start_page` starts it from another process; the other modules run in the process itself, which
imports no torch and serves requests without access to a disk or a driver.
"""
