"""Learn from one engine what its next step may rely on: step times, lengths of answers, demand, and interference.

Law: each learner receives events from the host and publishes a frozen value. A plan reads these values only.
"""
