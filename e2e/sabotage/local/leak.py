"""Quote in the errors of Redis what the server answered."""

from ballast_queue import connection
from ballast_queue.errors import QueueUnavailable

connection.failure_of = lambda error: QueueUnavailable(f"Redis is unavailable ({error})")
