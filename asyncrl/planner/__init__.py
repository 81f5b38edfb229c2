"""Plans of runs: checks and needs of a configuration, and simulation of the run under a virtual clock.

`plan/` checks and counts. The rest simulates, with the state machines that production drives: `world` is the
clock and the mail, `actors/` the processes of a run, `simulation` a whole one; `setting` and `rates` say what
is simulated, `outcome` what came of it. `studies/` are smaller worlds.
"""
