"""Jobs, items, leases and results in Redis or Valkey.

Law: every transition is one atomic Lua function; Lua moves items and guards, Python decides. Nothing is lost and no
result is visible twice, whichever process dies at whatever moment. Imports redis and pydantic only.
"""
