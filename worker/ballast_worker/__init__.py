"""The pod's process: OpenAI HTTP API, feeder, metrics and drain around one engine.

Law: the engine loop has a thread of its own; HTTP and queue reach it through its inbox, and it never waits for them.
"""
