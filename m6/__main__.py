"""``python -m m6``: the same as the command ``m6``, for launchers of modules."""

from m6.cli.main import main

if __name__ == "__main__":
    main()
