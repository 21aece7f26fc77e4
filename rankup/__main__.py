"""`python -m rankup COMMAND`, where `rankup` is not on the path."""

from rankup.cli import main

raise SystemExit(main())
