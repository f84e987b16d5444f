"""Shardwise."""
