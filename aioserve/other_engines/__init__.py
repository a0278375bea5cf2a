"""Other engines' option names and their equivalents here, for Python and the command line."""
