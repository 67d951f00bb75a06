"""The continuous-batching engine: `schedule() -> Batch`, `run(Batch) -> tokens`, `finish(tokens)`.

Law: only `executor` and what it calls touch tensors; everything else is plain Python and is tested without torch.
The engine executes plans of `ballast_policy` and decides nothing about who runs.
"""
