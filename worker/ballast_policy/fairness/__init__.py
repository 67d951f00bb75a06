"""Divide service among tenants: ledgers of service, reserved slots, and the order of work.

Law: an order depends on the work and its ledger alone. Requests in an engine and jobs in the queue share it.
"""
