"""The command line: a file for each command, and their common flags.

`add_parser` of each file declares the command and `run` executes it; `radixserve/cli.py` lists all.
`flags.py` makes flags from the fields of settings records: a field of `EngineConfig`,
`ServerConfig` or `SamplingParams` is a flag of the commands that take the record.
"""
