"""What options of other engines are called here, for each door of the library and the command."""
