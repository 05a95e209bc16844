"""Start ranks for `python -m finetune_trainer CONFIG`, and derive an exit code from their ends.

The supervisor is the main process of a node; it starts one worker per rank, watches the workers and
derives the termination message from their ends. No module here trains.
"""
