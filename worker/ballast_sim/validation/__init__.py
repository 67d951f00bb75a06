"""Compare the simulator with Ballast's own engine on this machine: step times and TTFT.

Law: the engine replays one slice of a trace to fit the step times, and another slice to be compared. This is the only
part of the simulator that runs the engine and that measures real time.
"""
