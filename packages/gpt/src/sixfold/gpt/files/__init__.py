"""What is written where: the folder of a run, new folders that are whole or absent, files that are nobody else's.

From outside: atomic_folder, output_files, run_dir.
"""
