"""Choose the next jobs and predict deadlines. Law: workers and the simulator use the same functions."""
