"""`python -m batchmill` is the command line."""

from batchmill.cli.main import main

if __name__ == "__main__":
    main()
