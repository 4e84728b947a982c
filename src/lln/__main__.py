"""`python -m lln` is `lln`."""

from lln.cli import main

main()
