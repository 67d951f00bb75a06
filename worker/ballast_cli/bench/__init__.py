"""`ballast bench`: compare policies on traces, and check the simulator against the engine.

verb reads the command line. mixed compares policies, workload prepares what they run on, table and pictures show the
result. encoder and validate are commands of their own.
"""
