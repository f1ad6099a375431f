"""OpenTelemetry spans of requests, an extension of the engine. See docs/advice.md."""
