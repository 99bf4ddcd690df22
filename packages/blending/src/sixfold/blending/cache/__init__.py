"""Index files on disk: used if they fit, else built and written. No other room touches the disk, except to open data.

From outside: file_names, index_files, indices, row_counts.
"""
