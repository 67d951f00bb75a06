"""Compare the values that a queue stores twice. Print the differences. Arguments: queue, URL and password of Redis."""

import json
import sys

from ballast_queue.redis_store import Queue

queue, url, password = sys.argv[1:]
print(json.dumps(Queue.connect(url, queue, password=password).check_integrity()))
