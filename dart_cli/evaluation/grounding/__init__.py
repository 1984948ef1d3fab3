"""Grounding benchmarks: does a model point at what an instruction names? `dart eval grounding`.

items     instructions about screenshots, regions, answers
layouts   the published sets: files, keys, forms of a box; a new set is an entry there
pictures  where a screenshot is: a file, or a row of a Parquet file
reader    a folder -> its items, and what is wrong with its rows
formats   how text models are asked, and how their texts are read
scorers   what points: an item in, candidates out; a model that points without text is a class there
scores    hit@1, hit@3, overlap@1, with intervals, by trait; refusals apart
verify    a second model judges the candidates
kept      settings and answers on disk, so that a second start goes on
misses    the page of misses
run       the verb
made      a set from our own environments: scripts/make_grounding_set.py
"""
