"""Ordered work as awaitable events."""
