"""`ftctl`: one file a command."""
