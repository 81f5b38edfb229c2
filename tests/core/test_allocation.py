"""Freed memory stays with the process."""

import subprocess
import sys

CODE = """
import resource
from asyncrl.core.runtime.allocation import keep_freed_memory

def faults():
    for _ in range(200):
        blocks = [bytearray(300_000) for _ in range(3)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def of_one_pass():
    before = faults()
    return faults() - before

by_default = of_one_pass()
if not keep_freed_memory():
    print("no mallopt here")
else:
    faults()
    print(of_one_pass() * 10 < by_default, by_default, of_one_pass())
"""


def test_blocks_of_a_groups_size_are_not_faulted_in_again_and_again() -> None:
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith(("True", "no mallopt")), done.stdout
