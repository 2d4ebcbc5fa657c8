"""Assisted generation for rows that accept different numbers of drafted tokens: drafters, and the loop."""
