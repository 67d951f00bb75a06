"""A worker as a replica of Ray Serve.

Law: a replica is a worker. Its ASGI app, its configuration file and its limits are those of a worker, and offline items
never pass through Serve. No other package of Ballast imports Ray.
"""
