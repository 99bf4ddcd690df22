"""Where bytes lie: a local folder, a URL, memory, a store of a user's own; each commits in one act.

From outside: by_pointer, frame_file, local, memory, range_reads, step_names, store, url.
"""
