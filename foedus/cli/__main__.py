"""`python -m foedus.cli`."""

from foedus.cli import main

main()
