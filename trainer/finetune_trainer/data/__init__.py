"""Turn rows into batches: source, formats, template, sequences, packing, plan, batch.

The loop calls `sequences.prepare`, `plan.DataPlan.of` and `batch.collate`. This package does not
know process groups, strategies or the loop.
"""
