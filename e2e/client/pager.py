"""Receive the notifications of Alertmanager's webhook, and print each alert as a line of JSON."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Pager(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        said = json.loads(self.rfile.read(int(self.headers["content-length"])))
        for alert in said["alerts"]:
            # In one piece: two notifications at once must not share a line.
            print(json.dumps(alert) + "\n", end="", flush=True)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing: the output has only the alerts."""


ThreadingHTTPServer(("", 8080), Pager).serve_forever()
