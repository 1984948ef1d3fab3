"""The processes that train one model together (docs/box.md).

distributed   the ranks as one torch.distributed group
processes     the ranks of `train.ranks = N`: started, watched, ended as one
lead          what rank 0 tells the others
follower      what a rank above 0 runs, and does
watch         who is which rank, who died or hangs, what it was doing, in one line in each log
"""
