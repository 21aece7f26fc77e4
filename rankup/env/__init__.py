"""Who this process is, from the environment variables of whichever launcher started it. No torch here."""
