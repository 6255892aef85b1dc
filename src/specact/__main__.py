"""``python -m specact`` is the command ``specact``."""

from specact.cli.main import main

if __name__ == "__main__":
    main()
