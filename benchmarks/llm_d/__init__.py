"""The parts of `benchmarks/llm_d_protocol.py`: published rows, the protocol, scenarios, calibration, the picture."""
