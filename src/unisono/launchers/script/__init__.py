"""Launchers of scripts."""
