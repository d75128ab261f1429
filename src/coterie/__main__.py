"""`python -m coterie`."""

from coterie.cli.app import main

if __name__ == "__main__":
    main()
