"""What the sessions of noxfile.py are made of. One arrow: each file imports only files above it.

    places     folders, limits, options: what is where
    installs   the venvs: one that all share, one of the site, those of releases and of a package alone
    wheels     a package's wheel, built once for the same sources
    commands   pytest over a package's tests, and what ci need not run twice
    alone      one package in an empty venv
    lanes      sessions beside each other

nox itself is imported for types alone: a test runs these parts without it.
"""
