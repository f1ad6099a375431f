"""The command line: radixserve demo, chat, generate, serve, replay, info."""
