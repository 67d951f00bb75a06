"""Plan GPUs: how many the traffic needs, with classes apart or mixed, today and over months, and what tokens cost.

Law: every figure of a plan follows from one YAML file (`inputs`), the traces and the seed. A question that physics
answers with no is refused with the figure that decides it.
"""
