"""What the author of a backend tests it with: a suite, a backend to copy, and one that says lines.

Needs the extra `testing`; nothing else of the operator imports it.
"""
