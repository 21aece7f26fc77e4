"""`python -m rankup COMMAND`: the command line, if `rankup` is not on the path."""

from rankup.cli import entry

if __name__ == "__main__":
    entry()
