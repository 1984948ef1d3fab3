"""The processes that train one model together (docs/box.md).

distributed   the ranks as one torch.distributed group
processes     starts, watches and ends the processes of `train.ranks = N` together
lead          the learner of rank 0, which sends commands to the other ranks
follower      the program of a rank above 0, which executes these commands
watch         the rank of this process; finds a rank that died or hangs, and reports it in each log
"""
