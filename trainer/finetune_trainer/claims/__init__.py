"""One writer per folder: who may write where, by files of unique names that never change."""
