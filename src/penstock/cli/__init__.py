"""The command line: one thin module per command.

Modules parse arguments and print results; other packages do the work.
"""
