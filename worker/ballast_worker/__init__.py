"""The process of a worker pod: OpenAI HTTP API, feeder, metrics and drain around one engine.

Law: the engine loop has its own thread. HTTP and queue reach it through its inbox, and it never waits for them.
"""
