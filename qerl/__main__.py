"""`python -m qerl` is the `qerl` command."""

from qerl.cli import main

main()
