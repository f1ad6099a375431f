"""What an engine's traffic says about its cache; an extension of the engine. See docs/advice.md."""
