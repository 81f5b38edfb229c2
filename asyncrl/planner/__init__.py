"""Simulation: whole runs under a virtual clock, with the state machines that production drives.

`world` is the clock and the mail, `actors/` the processes of a run, `simulation` a whole one; `setting` and
`rates` say what is simulated, `outcome` what came of it. `studies/` are smaller worlds.
"""
