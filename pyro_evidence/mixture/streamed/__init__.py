"""Rows that are not in memory at once: chunks that are read pass by pass, and shards that other processes hold."""
