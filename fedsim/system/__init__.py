"""The machine as a run uses it: files, memory, threads, processes and signals."""
