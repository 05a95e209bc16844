"""From rows to batches: source -> formats -> template -> sequences -> packing, plan -> batch.

The loop calls `sequences.prepare`, `plan.DataPlan.of` and `batch.collate`; nothing here knows a
process group, a strategy or the loop.
"""
