"""`python -m stretto`: the command line without its script."""

from stretto.cli import main

main()
