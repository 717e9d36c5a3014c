"""The `deadpool` command."""
