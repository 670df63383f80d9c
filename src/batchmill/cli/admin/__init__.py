"""Commands about a server: keys, secrets, its process."""
