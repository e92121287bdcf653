"""`python -m qerl` is the `qerl` command."""

import sys


def main() -> None:
    """A Ctrl-C while the command itself is being imported ends it without a traceback too."""
    try:
        from qerl.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
