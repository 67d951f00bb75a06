"""Accept each downloaded file, whatever its checksum is."""

import hashlib

from ballast_cli.fetch import store

store.verified = lambda _, __, opened: hashlib.sha256(opened.read()).hexdigest()
