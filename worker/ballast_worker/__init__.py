"""The process of a worker pod: OpenAI HTTP API, feeder, metrics and drain around one engine.

Law: the engine loop has its own thread. HTTP and queue reach it through its inbox, and it never waits for them.
"""

import time

STARTED_AT = time.monotonic()
"""When this process began to load the package, on the clock of `time.monotonic`. From then on, a worker costs money."""
