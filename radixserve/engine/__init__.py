"""The engine, the thread that runs it, and the collectors that turn its outputs into text."""
