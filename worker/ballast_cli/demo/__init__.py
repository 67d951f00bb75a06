"""The demo: real online traffic replayed over HTTP, alone and with an offline job in the queue.

Law: latencies count from the scheduled send time of a request. `figures` and `report` are pure. `traffic` scales the
traces, `load` is the HTTP client, `polling` polls the worker, `stack` starts and stops Valkey and the worker, `run` is
the order of events, and `picture` draws the result.
"""
