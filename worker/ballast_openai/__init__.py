"""OpenAI request bodies, and why Ballast refuses one.

Law: HTTP and jobs read every body here, so both accept and refuse the same bodies. Imports pydantic only.
"""
