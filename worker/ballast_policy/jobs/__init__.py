"""Choose the jobs that the next items come from, and predict whether jobs meet their deadlines.

Law: workers and the simulator choose by the same functions.
"""
