"""The verbs of `dart`: what is typed, and which part of the house it starts."""
