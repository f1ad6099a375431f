"""LoRA adapters: folders as PEFT saves them, the loaded ones by name, and their memory."""
