"""The HTTP server: OpenAI-compatible, above `radixserve.api`. Needs the extra `[serve]`.

process.py  socket, signals, loading, shutdown
app.py      the application: all routes, their errors
config.py   ServerConfig: a flag of `radixserve serve` for each field
gate/       before a route: API keys, limits, body; state that routes share
routes/     a file or folder for each protocol
wire/       request bodies, errors, usage, server-sent events
prompt/     messages, text or token ids to the prompt's token ids
turn/       a generation: submission, disconnects, streams, hints
answer/     generated text to content, reasoning and tool calls
"""
