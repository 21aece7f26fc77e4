"""`python -m rankup COMMAND`: the command line, for when `rankup` is not on PATH."""

from rankup.cli import entry

if __name__ == "__main__":
    entry()
