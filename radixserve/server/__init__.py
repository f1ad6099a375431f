"""HTTP: an OpenAI-compatible server above `radixserve.api`. Needs the extra `[serve]`."""
