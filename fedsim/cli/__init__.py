"""The thin command line, each of whose commands calls the Python function of the same name."""
