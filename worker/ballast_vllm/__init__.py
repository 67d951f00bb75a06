"""Ballast's policy as the scheduler of vLLM.

Two halves run in two processes of one `vllm serve`:

    EngineCore    scheduler, driver, internals: `--scheduler-cls ballast_vllm.scheduler.BallastScheduler`
    API server    the other modules: keys, tenants, feeder, metrics

The halves share only the following contract:

- A request states its place in the policy in `SamplingParams.extra_args["ballast"]`, or in
  `PoolingParams.extra_kwargs["ballast"]`: see `requests`. A request without it is online, of the tenant `default`.
- `additional_config["ballast"]` holds the policy configuration of a scheduler without an API server: see `settings`. It
  must not change between two starts, because vLLM compiles again when it does.
- The utility call `ballast_configure(fields)` changes the policy configuration from the next step on.
- The utility call `ballast_stats(since)` returns all counters, and the steps after the number `since`: see `stats`.

Only `internals` uses members of vLLM that are not public. No other package of Ballast imports vLLM.
"""
