"""The recipe in one command: `python -m recipes.tool_agent [--port N] [OPTION...]`.

It makes the model, starts `asyncrl up` with the options, and agents. It ends with the run and its exit code.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
from pathlib import Path

from recipes.tool_agent.agent import work

CLUSTER = Path(__file__).with_name("cluster.yaml")
MODEL = Path("runs/tool_agent_model")
NUM_AGENTS = 32


def main() -> int:
    """Return the exit code of the run."""
    parser = argparse.ArgumentParser(prog="python -m recipes.tool_agent", description=__doc__)
    parser.add_argument("--port", type=int, default=8100, help="of the gateway")
    given, options = parser.parse_known_args()
    if not (MODEL / "prompts.jsonl").exists():  # the last file that is made
        subprocess.run([sys.executable, "-m", "recipes.tool_agent.model", str(MODEL)], check=True)
    up = [sys.executable, "-m", "asyncrl.cli", "up", str(CLUSTER)]
    run = subprocess.Popen([*up, "--set", f"rollout.gateway.port={given.port}", *options])
    is_over = threading.Event()
    arguments = (f"http://127.0.0.1:{given.port}", is_over)
    agents = [threading.Thread(target=work, args=arguments) for _ in range(NUM_AGENTS)]
    for agent in agents:
        agent.start()
    try:
        return run.wait()
    except KeyboardInterrupt:  # `asyncrl up` has had it too, and ends the run in order
        return run.wait()
    finally:
        is_over.set()
        for agent in agents:
            agent.join()


if __name__ == "__main__":
    sys.exit(main())
