"""Enforce one writer per folder with files of unique names that are never changed."""
