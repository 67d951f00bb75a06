"""Run every benchmark in turn.

python benchmarks/all.py            run all of them, for more than a quarter of an hour on two cores
python benchmarks/all.py --quick    shorter runs with wider spreads
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
LEFT_OUT = {
    *("all.py", "size.py", "mutation.py", "demo_pooled.py", "constants.py", "pooled.py", "operator_scale.py"),
    *("foresight.py", "frontier.py", "mixed_engine.py", "llm_d_protocol.py", "policy_change.py", "soak.py"),
    *("job_queue_peers.py", "native_and_vllm.py", "ray_serve.py", "vllm_adapter_cost.py", "vllm_encoder.py"),
    *("vllm_api_server.py", "vllm_llm_d.py", "vllm_mixed.py", "vllm_step_sizes.py"),
}
"""Scripts that are no benchmarks, that need vLLM, Ray or an API server, or that are longer than all others together."""
QUICK = {
    "ceilings.py": ("--requests", "300"),
    "engine_step.py": ("--repeats", "3"),
    "fairness.py": ("--minutes", "2"),
    "hostile_clients.py": ("--seconds", "1", "--only", "none", "bodies"),
    "job_queue.py": ("--items", "5000", "--jobs", "50"),
    "kv_admission.py": ("--kv-tokens", "220000", "--load", "40", "--minutes", "1"),
    "moe_steps.py": ("--experts", "16", "--repeat", "6"),
    "plan.py": ("--seconds", "0.1"),
    "serving.py": ("--requests", "16", "--turns", "1"),
    "step_model.py": (),
}
"""The arguments of a script in a quick run. A script without an entry gets `--quick`."""


def main() -> int:
    """Run the benchmarks. The exit status is 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter runs")
    is_quick = parser.parse_args().quick
    failed = []
    for script in sorted(path for path in HERE.glob("*.py") if path.name not in LEFT_OUT):
        quick = QUICK.get(script.name, ("--quick",)) if is_quick else ()
        print(f"\n=== {script.name}", flush=True)
        if subprocess.run([sys.executable, str(script), *quick], check=False).returncode:
            failed.append(script.name)
    for name in failed:
        print(f"{name} failed", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
