"""Names of other engines' options, and ours, for each door of the library and the command."""
