"""Tests for authors of backends: the suite of the contract, and a scripted fake backend.

Needs the extra `testing`; no other package of the operator imports this one.
"""
