"""Boxes and where they are stored: integers and names, no tensor, no file, no rank."""
