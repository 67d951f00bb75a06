"""The continuous-batching engine: `schedule() -> Batch`, `run(Batch) -> tokens`, `finish(tokens)`.

Law: only `executor` and the modules that it calls use tensors. All other modules are plain Python and are tested
without torch. The engine carries out the plans of `ballast_policy` and never decides which requests run. `request`,
`stats`, `errors` and `footprint` are the contract of every engine, so of vLLM too. The rest is for CPUs.
"""
