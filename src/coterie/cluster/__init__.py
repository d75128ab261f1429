"""More than one machine: the runs of a study on Ray or Slurm.

The runs leave the same files as on this machine alone. Ray and submitit are the extra `cluster`;
they are imported where they are used, so that nothing else needs them.
"""
