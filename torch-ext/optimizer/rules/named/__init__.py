"""Rules that users choose by name, written like a rule of their own."""
