"""Forms in which models write tool calls, each with the parser of its text."""
