"""Jobs, items, leases and results in Redis or Valkey.

Law: every transition is one atomic Lua function. Lua moves items and checks tokens, and Python decides. No item is lost
and no result is visible twice, whichever process dies at any moment. Imports redis and pydantic only.
"""
