"""`python -m asyncrl.cli` is `asyncrl`."""

from asyncrl.cli.app import main

if __name__ == "__main__":
    main()
