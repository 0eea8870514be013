"""The command line: one table of commands, each of which imports what it needs when it runs.

Exit codes: 0 done, 1 it failed, 2 the command line or the settings cannot be used, 3 no server
answers, 130 interrupted.
"""
