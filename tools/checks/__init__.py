"""What the sessions of noxfile.py are made of. One arrow: each file imports only files above it.

    places       folders, limits, options: what is where
    installs     the venvs: one that all share, one of the site, those of releases and of a package alone
    wheels       a package's wheel, built once for the same sources
    commands     pytest over a package's tests, and what ci need not run twice
    gpu_groups   what `nox -s gpu` runs, in the order of what it tells most
    gpu_records  a pytest plugin: what became of each test, line by line
    gpu_page     the page of results, from what the groups wrote
    gpu_run      the groups one after the other, each ended by its time
    alone        one package in an empty venv
    lanes        sessions beside each other

nox itself is imported for types alone: a test runs these parts without it.
"""
