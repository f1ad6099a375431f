"""The command line: radixserve demo, chat, generate, replay, info."""
