"""The processes that train one model together (docs/box.md).

group         what a rank needs of the others, and the group of one rank
distributed   the ranks as one torch.distributed group, and what rank 0 tells the others
processes     the ranks of `train.ranks = N`: started, watched, ended as one
follower      what a rank above 0 runs
lead          what rank 0 tells the others, and what they do
gathering     what all ranks found, before anything is decided
own_work      how long a rank computes without waiting for the others
board         files by which each rank says what it does
watch         who died or hangs, what it was doing, in one line in each log
"""
