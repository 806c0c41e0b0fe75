"""`python -m foedus`."""

from foedus.cli import main

main()
