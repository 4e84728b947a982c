"""`python -m lln` is `lln`."""

from lln.lab.cli.app import main

main()
