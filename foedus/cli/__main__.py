"""`python -m foedus.cli`."""

from foedus.cli import main

if __name__ == "__main__":
    main()
