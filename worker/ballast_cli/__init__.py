"""The `ballast` command: one module per verb.

Law: a verb reads, asks the queue or a worker, and prints; what it explains was computed there. Heavy imports (torch,
uvicorn, matplotlib) stay inside the verb that needs them, so that `ballast submit` works on the light install.
"""
