"""The command line: thin, each command calls the Python function of the same name."""
