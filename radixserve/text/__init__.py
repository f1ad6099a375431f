"""Where text meets tokens: tokenizers, prompts and chat templates."""
