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

vLLM documents its arguments, the parameters of requests, and its configuration. Beyond these, Ballast uses:

    internals         members of the scheduler, of its queue and its KV blocks, and of EngineCore
    scheduler         the scheduler's methods and pause state
    driver, charges   the counts of its requests
    engine_client     two methods of the engine client, which it replaces, and the requests and outputs that pass them
    server, adapters  the state of the app: vLLM's arguments, the names of models, and the adapters, which they replace
    middleware, drain the same state, and the HTTP server in it: its TLS context and its exit
    serve, hosted     the parser, the checks, and the functions that start a server
    core_failure      the sentences with which vLLM's processes log why they end, and the stream of their logs
    engine_replay     the scheduler of an engine in the same process

`tests/vllm/support/members.py` lists every member by module. `tests/vllm/test_contract.py` finds each of them in the
source of a version. No other package of Ballast imports vLLM. Each way in checks the version first: see `versions`.
"""
