"""What programs call: Runtime, branches, chats, beam search, search over thoughts."""
