"""Boxes and where they are stored: integers and names, no tensor, no file, no rank.

From outside: box, integers, manifest.
"""
