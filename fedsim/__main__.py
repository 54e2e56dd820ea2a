"""`python -m fedsim` is the `fedsim` command."""

from fedsim.cli.main import main

if __name__ == "__main__":
    main()
