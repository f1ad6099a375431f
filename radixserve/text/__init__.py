"""Text to tokens and back: tokenizers, prompts, chat templates."""
