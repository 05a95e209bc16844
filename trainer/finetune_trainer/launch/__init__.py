"""From `python -m finetune_trainer CONFIG` to running ranks, and from their ends to an exit code.

The supervisor is the main process of a node; it starts one worker a rank, watches them, and turns
how they ended into the termination message. No module here trains anything.
"""
