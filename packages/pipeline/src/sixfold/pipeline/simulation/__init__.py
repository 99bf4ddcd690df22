"""What a program takes before any process starts: time and memory under given costs.

From outside: costs, memory, simulate.
"""
