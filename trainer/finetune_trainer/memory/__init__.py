"""What a run takes of memory, by formula and by trace, and whether it is there."""
