"""Replay traffic through simulated replicas that run a policy, and report latencies, throughput and fairness.

Law: deterministic and in virtual time. A replica asks the policy host for each plan and executes it exactly, as an
engine does. It checks that each plan can be executed. Only step times and tokens are simulated: from a model of the
hardware, and from the lengths in the trace.
"""
