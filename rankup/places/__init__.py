"""Where the bytes of a run lie, and who owns it. No torch here."""
