"""Converse with a base model and the model that was trained from it, in a terminal or a pipe."""
