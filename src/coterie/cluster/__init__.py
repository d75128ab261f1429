"""More than one machine: the runs of a study on Ray or Slurm, with the files that this machine alone would leave.

Ray and submitit are the extra `cluster`; they are imported where they are used, so that nothing
else needs them.
"""
