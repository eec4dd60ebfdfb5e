"""The admin command line."""
