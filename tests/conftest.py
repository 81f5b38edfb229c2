"""For all tests: a run that was started in the background of a shell takes Ctrl-C as any other does."""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # inherited, and passed on to every child
    signal.signal(signal.SIGINT, signal.default_int_handler)
