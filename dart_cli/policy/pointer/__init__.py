"""The pointer: a head that points at a patch of the prompt's last screenshot (GUI-Actor, arXiv 2506.03143).

tokens   the three tokens of a pointer, and whether the patches of a completion fit them
head     the head itself: visual embeddings and a hidden state -> logits of patches
text     numbers of a text <-> pointers among its tokens, without torch
folder   a model folder with a head: add one to a folder, load it
"""
