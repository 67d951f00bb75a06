"""The `ballast` command: one module per subcommand, and one for those that change the state of a job.

Law: a subcommand reads its input, asks the queue, a worker, or the API server, and prints the answer. It computes no
condition or reason of its own. Heavy imports (torch, uvicorn, matplotlib) stay inside the subcommand that needs them,
so `ballast submit` works on the light install.
"""
