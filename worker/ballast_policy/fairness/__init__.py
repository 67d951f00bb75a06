"""Divide service among tenants, of requests and jobs. Law: an order depends on the work and its ledger alone."""
