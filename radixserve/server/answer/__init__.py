"""From generated text to content, reasoning and tool calls."""
