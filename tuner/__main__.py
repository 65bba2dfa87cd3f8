"""`python -m tuner` is the `tune` command."""

from tuner.cli.main import main

main()
