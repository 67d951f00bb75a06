"""The demo: real online traffic replayed over HTTP, alone and with an offline job in the queue.

Law: `traffic` and `figures` are pure; `load` is the client and measures from the scheduled send time; `stage` starts
and stops the real parts; `run` is the order of events; `picture` draws what `run` measured.
"""
