"""The conditions of an InferenceDeployment, one module for each condition, and the chain of its checks at the end.

Law: PURE. A condition is the first result of its chain. A missing signal is Unknown, and never counts as idle.
"""
