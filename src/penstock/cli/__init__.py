"""The command line: one thin module for each command.

Modules parse arguments and print results; the work is done by the packages they call.
"""
