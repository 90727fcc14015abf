"""Entry point of ``python -m headway``, the same as the command ``headway``."""

from headway.cli import main

if __name__ == "__main__":
    main()
