"""The command line: one file a command, arguments and printing alone; what they do is in the other rooms."""
